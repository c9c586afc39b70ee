"""A file system whose listings lag behind, as NFS may: what it does not list is not taken for absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_precision.dump import reader
from mindspeed_precision.dump.attempts import begin_attempt, end_attempt
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.testing.fake_runs import write_fake_run


class StaleListing:
    """Stands in for such a file system: names in ``unseen`` are opened as ever, and never listed."""

    def __init__(self, monkeypatch):
        self.unseen: set[str] = set()
        listed = Path.iterdir

        def iterdir(path):
            return (entry for entry in listed(path) if entry.name not in self.unseen)

        monkeypatch.setattr(Path, "iterdir", iterdir)


@pytest.fixture
def stale(monkeypatch):
    return StaleListing(monkeypatch)


def test_a_rank_that_is_not_listed_is_read(tmp_path, stale):
    """The manifest says how many ranks there are."""
    write_fake_run(tmp_path / "run", steps=1, ranks=3)
    whole = load_run(tmp_path / "run")
    stale.unseen = {"rank00001", "rank00002"}
    assert not stale.unseen & {path.name for path in (tmp_path / "run").iterdir()}
    assert load_run(tmp_path / "run") == whole
    assert whole.notes == ()


def test_what_is_listed_and_gone_is_a_note_or_one_error(tmp_path, monkeypatch):
    write_fake_run(tmp_path / "run", steps=1, ranks=2)
    original = Path.iterdir

    def also_what_is_gone(path):
        yield from original(path)
        if path == tmp_path / "run":
            yield path / "rank00007"

    monkeypatch.setattr(Path, "iterdir", also_what_is_gone)
    assert sorted(load_run(tmp_path / "run").ranks) == [0, 1]


def test_a_seal_that_is_not_listed_is_read_and_one_that_is_not_there_is_not_assumed(tmp_path, stale):
    write_fake_run(tmp_path / "run", steps=1)
    stale.unseen = {"COMPLETE", "index.jsonl", "run.json", "effective.json"}
    assert load_run(tmp_path / "run").ranks[0].complete
    (tmp_path / "run" / "rank00000" / "COMPLETE").unlink()
    run = load_run(tmp_path / "run")
    assert not run.ranks[0].complete
    assert any("did not end as planned" in note for note in run.notes)


def test_an_index_that_is_behind_its_seal_is_refused(tmp_path):
    """The seal has come, the end of the index has not: that is no complete run, and no crash."""
    write_fake_run(tmp_path / "run", steps=1)
    index = tmp_path / "run" / "rank00000" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:-3]))
    with pytest.raises(DumpError, match="truncated index"):
        load_run(tmp_path / "run")


def test_a_run_that_is_not_listed_is_not_written_into(tmp_path, stale):
    write_fake_run(tmp_path / "run", steps=1)
    end_attempt(tmp_path / "run")
    stale.unseen = {"run.json", "rank00000"}
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(DumpError, match="not empty"):
        begin_attempt(tmp_path / "run", "refuse")
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_restarts_that_are_not_listed(tmp_path, stale):
    """They are numbered without a gap, so that each is looked for by name."""
    run = write_fake_run(tmp_path / "run", steps=1)
    for number in (1, 2):
        write_fake_run(run / f"restart{number:02d}", steps=1)
    stale.unseen = {"restart01", "restart02"}
    assert [path.name for path in reader.attempt_directories(run)] == ["restart01", "restart02"]
    assert begin_attempt(run, "continue").name == "restart03"
