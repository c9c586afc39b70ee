"""Runs behind a URL: what is read there is what was written, and what is wrong there is one clear error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial, partialmethod
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mindspeed_precision import cli
from mindspeed_precision.config import load_settings
from mindspeed_precision.dump.object_store import CACHE, _Copy, is_url
from mindspeed_precision.engines import Resources
from mindspeed_precision.errors import ConfigError, DumpError
from mindspeed_precision.loading import load_run
from mindspeed_precision.testing.celled import smallest
from mindspeed_precision.testing.fake_runs import FakeRun, write_fake_run
from mindspeed_precision.verify.check import check_run

fsspec = pytest.importorskip("fsspec", reason="fsspec reads URLs (pip install 'mindspeed-precision[remote]')")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(tmp_path):
    return write_fake_run(tmp_path / "there" / "run")


@pytest.fixture
def memory(run, cache):
    """The run in the memory of this process, which is a store like any other to fsspec."""
    store = fsspec.filesystem("memory")
    store.put(str(run), "/bucket/run", recursive=True)
    yield "memory://bucket/run"
    store.rm("/bucket", recursive=True)


@pytest.fixture
def http(run, cache):
    """The run behind a web server of the standard library: another process finds it, too."""
    handler = partial(_Quiet, directory=str(run.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/run"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def content(run):
    return run.manifest, {rank: (one.records, one.steps, one.complete) for rank, one in run.ranks.items()}


def elements(run):
    found = {}
    for rank in run.ranks.values():
        for record in rank.records:
            if record.payload is not None:
                found[record.seq] = rank.payload(record).bits.tobytes()
    return found


def test_what_is_read_is_what_was_written(memory, run):
    assert content(load_run(memory)) == content(load_run(run))
    kept = elements(load_run(run))
    assert kept, "a run without elements shows nothing"
    assert elements(load_run(memory)) == kept


def test_elements_are_copied_when_they_are_asked_for(memory, cache):
    loaded = load_run(memory)
    here = set(cache.rglob("*.safetensors"))
    assert not here
    elements(loaded)
    assert set(cache.rglob("*.safetensors"))


def test_a_large_run_is_checked_in_parts(memory, run):
    limit = Resources(memory=smallest(run), jobs=1)
    here, there = check_run(run, resources=limit), check_run(memory, resources=limit)
    (told,) = [note for note in there.notes if "checked in parts" in note]
    assert told in here.notes
    assert (there.findings, there.outcomes) == (here.findings, here.outcomes)


def test_what_changed_is_copied_again_and_what_is_gone_goes(memory, run, cache):
    elements(load_run(memory))
    store = fsspec.filesystem("memory")
    other = write_fake_run(run.parent / "other", FakeRun(seed=7))
    store.rm("/bucket/run", recursive=True)
    store.put(str(other), "/bucket/run", recursive=True)
    store.rm("/bucket/run/rank00000/COMPLETE")
    found = load_run(memory)
    assert not found.ranks[0].complete
    assert found.ranks[0].records == load_run(other).ranks[0].records
    assert elements(found) == elements(load_run(other)) != elements(load_run(run))


def test_what_did_not_change_is_not_copied_again(memory, cache, monkeypatch):
    load_run(memory)
    (index,) = cache.rglob("index.jsonl")
    before = index.stat().st_ino
    load_run(memory)
    assert index.stat().st_ino == before


def test_a_store_that_says_nothing_of_its_files_is_copied_again(http, run):
    """A web server lists names alone: what is the same there is not known."""
    pytest.importorskip("aiohttp", reason="fsspec reads http:// with aiohttp")
    elements(load_run(http))
    other = write_fake_run(run.parent / "other", FakeRun(seed=7))
    shutil.rmtree(run)
    shutil.copytree(other, run)
    found = load_run(http)
    assert content(found) == content(load_run(other))
    assert elements(found) == elements(load_run(other))


def test_a_listing_of_names_and_sizes_is_no_stamp(memory, run, monkeypatch):
    kind = type(fsspec.filesystem("memory"))
    find = kind.find

    def bare(self, *given, **options):
        found = find(self, *given, **options)
        if not options.get("detail"):
            return found
        return {name: {"name": name, "size": entry["size"], "type": "file"} for name, entry in found.items()}

    monkeypatch.setattr(kind, "find", bare)
    elements(load_run(memory))
    other = write_fake_run(run.parent / "other", FakeRun(seed=7))
    fsspec.filesystem("memory").put(f"{other}/", "/bucket/run/", recursive=True)
    assert elements(load_run(memory)) == elements(load_run(other)) != elements(load_run(run))


def test_a_restart_that_is_gone_goes(memory, run):
    store = fsspec.filesystem("memory")
    store.put(str(run), "/bucket/run/restart01", recursive=True)
    assert load_run(memory).notes
    store.rm("/bucket/run/restart01", recursive=True)
    assert content(load_run(memory)) == content(load_run(run))


def test_another_process_that_copies_at_the_same_time_changes_nothing(memory, run, monkeypatch):
    kind = type(fsspec.filesystem("memory"))
    get, others = kind.get, []

    def slow(self, *given, **options):
        get(self, *given, **options)
        if not others:
            others.append(threading.Thread(target=lambda: others.append(content(load_run(memory)))))
            others[0].start()
            others[0].join(timeout=0.5)  # it has the time to take away what is being copied

    monkeypatch.setattr(kind, "get", slow)
    assert content(load_run(memory)) == content(load_run(run))
    others[0].join()
    assert others[1:] == [content(load_run(run))]


def test_what_is_interrupted_is_copied_again(memory, run, cache, monkeypatch):
    kind = type(fsspec.filesystem("memory"))
    get = kind.get

    def interrupted(self, *given, **options):
        get(self, *given, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kind, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_run(memory)
    assert not list(cache.rglob("index.jsonl*"))
    assert content(load_run(memory)) == content(load_run(run))


def test_a_damaged_note_of_a_copy_is_none(memory, run, cache):
    load_run(memory)
    (note,) = (cache / "runs").glob("*.json")
    for text in ("{", "[]", '{"url": "memory://x/run"}'):
        note.write_text(text)
        assert content(load_run(memory)) == content(load_run(run))


def test_where_no_copy_can_be_kept(memory, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    assert cli.main(["check", memory]) == 2
    assert f"copies cannot be kept here (found Not a directory); set {CACHE}" in capsys.readouterr().err


def test_objects_that_stand_for_directories(memory, run, monkeypatch):
    kind = type(fsspec.filesystem("memory"))
    find = kind.find

    def marked(self, path, size=0, **options):
        more = {f"{path}/{name}": {"size": size, "created": 1} for name in ("rank00000", "more/")}
        return find(self, path, **options) | more if options.get("detail") else find(self, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "find", marked)
        assert content(load_run(memory)) == content(load_run(run))
        patched.setattr(kind, "find", partialmethod(marked, size=1))
        with pytest.raises(DumpError, match="a file and a directory of one name"):
            load_run(memory)


@pytest.mark.parametrize("command", ["compare", "check", "verify", "show", "certify", "data"])
def test_commands_take_urls(memory, run, command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    twin = {"compare": [str(run)], "verify": [str(run)], "certify": [str(run)]}.get(command, [])
    local = cli.main([command, str(run), *([str(shutil.copytree(run, tmp_path / "twin"))] if twin else [])])
    capsys.readouterr()
    assert cli.main([command, memory, *twin]) == local
    assert "cannot" not in capsys.readouterr().err


def test_the_report_of_a_url_is_written_where_one_works(memory, run, monkeypatch, tmp_path, capsys):
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    assert cli.main(["compare", str(run), memory]) == 0
    assert (tmp_path / "desk" / "compare" / "report.html").is_file()
    assert [entry.name for entry in (tmp_path / "desk").iterdir()] == ["compare"]


def test_another_process_reads_elements_through_the_copy(http, run):
    pytest.importorskip("aiohttp", reason="fsspec reads http:// with aiohttp")
    loaded = load_run(http)
    assert content(loaded) == content(load_run(run))
    script = (
        "import sys; from mindspeed_precision.loading import load_run\n"
        "from mindspeed_precision.dump.payload import PayloadFile\n"
        "from mindspeed_precision.dump.inside import require_inside\n"
        "from pathlib import Path\n"
        "path, run = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "assert not path.exists(); require_inside(path, run); print(path.stat().st_size)"
    )
    name = next(record.payload for record in loaded.ranks[0].records if record.payload)
    path = loaded.ranks[0].directory / name
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(loaded.path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == (run / "rank00000" / name).stat().st_size


def test_a_run_cannot_name_a_place_to_copy_from(run, cache, tmp_path):
    """The note of where a copy comes from lies beside it: a run that somebody hands over has none."""
    payload = next(run.rglob("*.safetensors"))
    payload.unlink()
    (run.parent.with_suffix(".json")).write_text(
        json.dumps({"url": "memory://evil/run", "files": {payload.relative_to(run).as_posix(): "1"}})
    )
    fsspec.filesystem("memory").pipe(f"/evil/run/{payload.relative_to(run).as_posix()}", b"evil")
    with pytest.raises(DumpError):
        elements(load_run(run))
    assert not payload.exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://nowhere/run", "no such run directory"),
        ("nonsense://bucket/run", "Protocol not known"),
        ("memory://", "no name of a run"),
    ],
)
def test_what_is_not_there(cache, url, said, capsys):
    assert cli.main(["check", url]) == 2
    assert said in capsys.readouterr().err


def test_a_name_that_leads_out(cache):
    store = fsspec.filesystem("memory")
    store.pipe("/leads/run/run.json", b"{}")
    store.store["/leads/run/../../out"] = store.store["/leads/run/run.json"]
    try:
        with pytest.raises(DumpError, match="leads out of the run"):
            load_run("memory://leads/run")
        assert not list(cache.rglob("out"))
    finally:
        store.store.pop("/leads/run/../../out")


def test_a_password_is_not_shown(cache, capsys):
    assert cli.main(["check", "ftp://me:hunter2@127.0.0.1:1/run"]) == 2
    said = capsys.readouterr().err
    assert "hunter2" not in said
    assert "127.0.0.1" in said


def test_a_signature_is_not_shown(cache, capsys, tmp_path, monkeypatch):
    url = "memory://me:hunter2@bucket/run?X-Amz-Signature=5ec2e7&b=1"
    store = fsspec.filesystem("memory")
    monkeypatch.setattr(
        type(store), "find", lambda *_, **__: (_ for _ in ()).throw(ValueError(f"403 of {url!r}"))
    )
    assert cli.main(["check", url, "--json"]) == 2
    said = "".join(capsys.readouterr())
    assert "403 of" in said
    assert "5ec2e7" not in said
    assert "hunter2" not in said
    assert "5ec2e7" not in _Copy.of(url).directory.name


def test_copies_are_for_their_owner_alone(memory, cache):
    load_run(memory)
    (record,) = (cache / "runs").glob("*.json")
    assert record.stat().st_mode & 0o077 == 0
    assert (cache / "runs").stat().st_mode & 0o077 == 0


def test_no_run_is_written_to_a_url(tmp_path):
    for out in ("s3://bucket/run", Path("s3://bucket/run")):
        with pytest.raises(ConfigError, match="written to a directory"):
            load_settings(out=out)
    assert load_settings(out=tmp_path / "run").out == tmp_path / "run"


def test_without_fsspec(run, tmp_path):
    """Paths need no fsspec; a URL says what to install."""
    (tmp_path / "none" / "fsspec").mkdir(parents=True)
    (tmp_path / "none" / "fsspec" / "__init__.py").write_text("raise ImportError('not here')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'none'}:{os.environ.get('PYTHONPATH', '')}"}
    call = partial(subprocess.run, capture_output=True, text=True, env=environment)
    tool = [sys.executable, "-m", "mindspeed_precision"]
    assert call([*tool, "show", str(run)]).returncode == 0
    refused = call([*tool, "show", "s3://bucket/run"])
    assert refused.returncode == 2
    assert "mindspeed-precision[remote]" in refused.stderr


@pytest.mark.parametrize(
    "text",
    [
        "s3://b/run",
        "hdfs://n/run",
        "simplecache::s3://b/run",
        "zip::simplecache::s3://b/run.zip",
        "S3://b/run",
    ],
)
def test_urls(text):
    assert is_url(text)


@pytest.mark.parametrize(
    "text", ["runs/a", "/runs/a", "./s3:/x", "a:b", "run::x", "a::b/c", "C:/runs", Path("s3://b/run")]
)
def test_paths(text):
    assert not is_url(text)
