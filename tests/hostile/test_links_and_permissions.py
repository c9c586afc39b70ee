"""No reader leaves the run, or waits for ever; what is written has the permissions that the umask leaves."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from mindspeed_precision import load_run
from mindspeed_precision.cli import main
from mindspeed_precision.errors import DumpError
from mindspeed_precision.testing.fake_runs import write_fake_run

FILES = ["run.json", "rank00000", "rank00000/index.jsonl", "rank00000/COMPLETE", "rank00000/effective.json"]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("original") / "run")


@pytest.fixture
def run(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def payload_of(run: Path) -> str:
    return next(path.relative_to(run) for path in run.glob("rank00000/*.safetensors")).as_posix()


def read_everything(run: Path) -> None:
    loaded = load_run(run)
    for rank in loaded.ranks.values():
        for record in rank.records:
            if record.payload is not None:
                rank.payload(record)


@pytest.mark.parametrize("name", [*FILES, "a payload"])
def test_a_link_that_leads_out_is_not_followed(run, tmp_path, name):
    name = payload_of(run) if name == "a payload" else name
    outside = tmp_path / "outside"
    shutil.move(run / name, outside)
    (run / name).symlink_to(outside)
    with pytest.raises(DumpError, match="a link leads out of the run") as caught:
        read_everything(run)
    assert str(run / name) in str(caught.value)


@pytest.mark.parametrize("name", [*FILES, "a payload"])
def test_a_link_that_stays_inside_is(run, name):
    name = payload_of(run) if name == "a payload" else name
    shutil.move(run / name, run / "elsewhere")
    (run / name).symlink_to(run / "elsewhere", target_is_directory=name == "rank00000")
    read_everything(run)


def test_a_run_may_be_reached_by_a_link(run, tmp_path):
    (tmp_path / "link").symlink_to(run, target_is_directory=True)
    read_everything(tmp_path / "link")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", [*FILES[2:], "a payload"])
def test_a_pipe_is_not_waited_for(run, name):
    name = payload_of(run) if name == "a payload" else name
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(DumpError, match=r"not a file|the index is gone"):
        read_everything(run)


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "..", ".", "", "a\\u0000b", "x" * 5000])
def test_a_payload_of_a_name_that_is_none(run, name):
    """The seal would notice the change: it goes first, as whoever writes such a line can leave it out."""
    (run / "rank00000" / "COMPLETE").unlink()
    index = run / "rank00000" / "index.jsonl"
    index.write_text(index.read_text().replace(f'"{Path(payload_of(run)).name}"', f'"{name}"'))
    with pytest.raises(DumpError):
        read_everything(run)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o000])
def test_what_is_written_follows_the_umask(tmp_path, monkeypatch, mask):
    monkeypatch.chdir(tmp_path)
    before = os.umask(mask)
    try:
        one, other = (write_fake_run(tmp_path / name) for name in ("one", "other"))
        main(["compare", str(one), str(other), "--out", str(tmp_path / "out")])
    finally:
        os.umask(before)
    found = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert len(found) > 10
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o775 if path.is_dir() else 0o664) & ~mask, path
        assert not mode & stat.S_IWOTH
