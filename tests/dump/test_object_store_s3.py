"""The same of a store that speaks S3, as OBS does: a real server of that protocol, on this machine."""

from __future__ import annotations

import pytest

from mindspeed_precision import cli
from mindspeed_precision.dump.object_store import CACHE
from mindspeed_precision.loading import load_run
from mindspeed_precision.testing.fake_runs import write_fake_run

pytestmark = pytest.mark.long

server = pytest.importorskip("moto.server", reason="`make object-store` installs a server of S3")
pytest.importorskip("s3fs", reason="`make object-store` installs a client of S3")


@pytest.fixture
def store(monkeypatch, tmp_path):
    import s3fs

    started = server.ThreadedMotoServer(port=0, ip_address="127.0.0.1")
    started.start()
    host, port = started.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    store.makedirs("bucket", exist_ok=True)
    yield store
    started.stop()


def test_runs_on_s3(store, tmp_path, monkeypatch, capsys):
    run = write_fake_run(tmp_path / "run")
    store.put(str(run), "bucket/team/run", recursive=True)
    there, here = load_run("s3://bucket/team/run"), load_run(run)
    assert there.manifest == here.manifest
    assert there.ranks[0].records == here.ranks[0].records
    record = next(record for record in here.ranks[0].records if record.payload)
    assert there.ranks[0].payload(record).bits.tobytes() == here.ranks[0].payload(record).bits.tobytes()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", str(run)]) == cli.main(["check", "s3://bucket/team/run"])
    capsys.readouterr()
    assert cli.main(["check", "s3://bucket/team/absent"]) == 2
    assert "no such run directory" in capsys.readouterr().err
    assert cli.main(["check", "s3://elsewhere/run"]) == 2
    assert "s3://elsewhere/run" in capsys.readouterr().err


def test_an_index_that_changed_is_copied_again(store, tmp_path):
    run = write_fake_run(tmp_path / "run")
    store.put(str(run), "bucket/run", recursive=True)
    assert load_run("s3://bucket/run").ranks[0].complete
    store.rm("bucket/run/rank00000/COMPLETE")
    assert not load_run("s3://bucket/run").ranks[0].complete
