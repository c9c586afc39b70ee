"""A run and its restarts as one: whose steps count, what is left out, and that it is said."""

from __future__ import annotations

import json
import shutil

import pytest

from mindspeed_precision.certify.certificate import digest_of
from mindspeed_precision.dump.attempts import attempt_directories, begin_attempt, end_attempt
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run, update_manifest, write_manifest
from mindspeed_precision.errors import ConfigError, DumpError
from mindspeed_precision.records import (
    INIT_STEP,
    Digest,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
)

WEIGHT = ParameterDeclaration(fqn="w", shape=(2,), dtype="float32", trainable=True)


def write(
    run, steps, *, restart="continue", ranks=1, mark=0, parameters=(WEIGHT,), complete=False, first=True
):
    """Write an attempt whose records say ``mark`` and their step; return where."""
    directory = begin_attempt(run, restart)
    manifest = {"parallel": {"world_size": ranks}, "settings": {}, "findings": [{"id": f"x.{mark}"}]}
    write_manifest(directory, manifest)
    for rank in range(ranks):
        writer = RankWriter(directory, coordinates=RankCoordinates(rank=rank, world_size=ranks))
        writer.declare_parameters(parameters)
        for seq, step in enumerate([INIT_STEP, *steps]):
            key = RecordKey(step=step, microbatch=-1, phase=Phase.OPTIMIZER, fqn="w", role=Role.PARAM)
            digest = Digest(fingerprint=100 * mark + step + 1, unordered=0)
            record = TensorRecord(seq=seq, key=key, shape=(2,), dtype="float32", layout=None, digest=digest)
            writer.write_step(step, [record], {}, microbatches=1)
        writer.close(complete=complete)
    if first and steps:
        update_manifest(directory, {"first_step": steps[0]})
    return directory


def said(run, rank=0):
    """Return step and mark of each record."""
    records = load_run(run).ranks[rank].records
    assert [record.seq for record in records] == list(range(len(records)))
    return [(r.key.step, r.digest.fingerprint // 100) for r in records]


def test_what_was_made_again_counts_once(tmp_path):
    run = tmp_path / "run"
    write(run, [0, 1, 2, 3, 4, 5])
    write(run, [3, 4], mark=1)
    write(run, [4, 5, 6], mark=2, complete=True)
    assert [path.name for path in attempt_directories(run)] == ["restart01", "restart02"]
    assert said(run) == [(-1, 0), (0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 2), (6, 2)]
    joined = load_run(run)
    assert joined.ranks[0].complete
    assert joined.ranks[0].steps == (-1, 0, 1, 2, 3, 4, 5, 6)
    assert [finding["id"] for finding in joined.manifest["findings"]] == ["x.0", "x.1", "x.2"]
    assert joined.notes == (
        "left out: steps 3 to 5 of the first attempt, since restart01 began with step 3",
        "left out: step 4 of restart01, since restart02 began with step 4",
        "the first attempt ended after step 2; restart01 goes on from there",
        "restart01 ended after step 3; restart02 goes on from there",
    )


def test_each_restart_is_readable_by_itself(tmp_path):
    write(tmp_path / "run", [0, 1])
    restart = write(tmp_path / "run", [1, 2], mark=1)
    assert said(restart) == [(-1, 1), (1, 1), (2, 1)]


def test_a_restart_from_the_beginning_is_all_that_counts(tmp_path):
    write(tmp_path / "run", [0, 1, 2])
    write(tmp_path / "run", [0, 1], mark=1)
    assert said(tmp_path / "run") == [(-1, 1), (0, 1), (1, 1)]


def test_steps_after_the_restart_do_not_count_though_nobody_made_them_again(tmp_path):
    """They came from a state that the training did not keep."""
    write(tmp_path / "run", [0, 1, 2, 3])
    write(tmp_path / "run", [2], mark=1)
    assert said(tmp_path / "run") == [(-1, 0), (0, 0), (1, 0), (2, 1)]


def test_steps_that_one_rank_alone_lost_are_named(tmp_path):
    """It was killed before it wrote them; the checkpoint was there."""
    run, short = write(tmp_path / "run", [0, 1, 2, 3], ranks=2), write(tmp_path / "short", [0, 1], ranks=2)
    shutil.rmtree(run / "rank00001")
    shutil.copytree(short / "rank00001", run / "rank00001")
    write(run, [4], ranks=2, mark=1, complete=True)
    assert load_run(run).ranks[1].steps == (-1, 0, 1, 4)
    assert "rank 1: its steps 2 to 3 are in no attempt" in load_run(run).notes
    assert not [note for note in load_run(run).notes if note.startswith("rank 0")]


def test_steps_that_no_attempt_has_are_named(tmp_path):
    write(tmp_path / "run", [0, 1])
    write(tmp_path / "run", [4], mark=1)
    assert "steps 2 to 3 are in no attempt: restart01 began with step 4" in load_run(tmp_path / "run").notes


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ranks": 2}, "another layout"),
        (
            {
                "parameters": (
                    WEIGHT,
                    ParameterDeclaration(fqn="v", shape=(1,), dtype="float32", trainable=True),
                )
            },
            "other parameters",
        ),
    ],
)
def test_what_is_another_training_is_not_joined(tmp_path, changes, word):
    write(tmp_path / "run", [0, 1])
    restart = write(tmp_path / "run", [1, 2], mark=1, **changes)
    joined = load_run(tmp_path / "run")
    assert said(tmp_path / "run") == [(-1, 0), (0, 0), (1, 0)]
    (note,) = [note for note in joined.notes if "read " in note]
    assert word in note
    assert str(restart) in note
    assert said(restart)[-1] == (2, 1)


def test_an_attempt_without_a_step_is_left_out_and_named(tmp_path):
    write(tmp_path / "run", [0, 1])
    write(tmp_path / "run", [], mark=1)
    write(tmp_path / "run", [2], mark=2)
    assert said(tmp_path / "run") == [(-1, 0), (0, 0), (1, 0), (2, 2)]
    assert (
        "restart01 ended before its first step was written, and is left out"
        in load_run(tmp_path / "run").notes
    )


def test_a_first_attempt_that_wrote_nothing_hides_no_restart(tmp_path):
    create_run(tmp_path / "run", {"parallel": {"world_size": 1}, "settings": {}})
    with pytest.raises(DumpError, match="no rank of this run wrote anything"):
        load_run(tmp_path / "run")
    write(tmp_path / "run", [0], mark=1)
    assert said(tmp_path / "run") == [(-1, 1), (0, 1)]


def test_a_run_without_restarts_is_as_ever(tmp_path):
    write(tmp_path / "run", [0, 1], complete=True)
    loaded = load_run(tmp_path / "run")
    assert loaded.notes == ()
    assert loaded.ranks[0].joined == ()


def test_the_digest_of_a_certificate_is_of_all_attempts(tmp_path):
    write(tmp_path / "run", [0, 1])
    write(tmp_path / "run", [1], mark=1)
    write(tmp_path / "other", [0, 1])
    write(tmp_path / "other", [1], mark=2)
    assert digest_of(load_run(tmp_path / "run")) != digest_of(load_run(tmp_path / "other"))


def test_a_restart_that_is_a_link_outward_is_refused(tmp_path):
    write(tmp_path / "run", [0])
    write(tmp_path / "other", [1])
    (tmp_path / "run" / "restart01").symlink_to(tmp_path / "other")
    with pytest.raises(DumpError, match="leads out of the run"):
        load_run(tmp_path / "run")


def test_refused_unless_it_is_asked_for(tmp_path):
    write(tmp_path / "run", [0])
    end_attempt(tmp_path / "run")  # this process is done with it
    with pytest.raises(DumpError, match=r"not empty.*restart=continue"):
        begin_attempt(tmp_path / "run", "refuse")
    assert not attempt_directories(tmp_path / "run")
    (tmp_path / "yours").mkdir()
    (tmp_path / "yours" / "file").write_text("")
    with pytest.raises(DumpError) as caught:
        begin_attempt(tmp_path / "yours", "continue")
    assert "continue" not in caught.value.remedy


@pytest.mark.parametrize("name", [".nfs0000000001", ".DS_Store", ".snapshot/", "lost+found/"])
@pytest.mark.parametrize("restart", ["refuse", "continue"])
def test_what_a_system_leaves_in_a_directory_is_no_run(tmp_path, name, restart):
    run = tmp_path / "run"
    (run / name).mkdir(parents=True) if name.endswith("/") else (run.mkdir(), (run / name).write_text(""))
    assert begin_attempt(run, restart) == run
    write_manifest(run, {})
    end_attempt(run)
    with pytest.raises(DumpError, match="not empty"):
        begin_attempt(run, "refuse")


@pytest.mark.parametrize("name", ["notes.txt", "lost", "found+lost"])
def test_anything_else_is_somebodys(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(DumpError, match="not empty") as caught:
        begin_attempt(tmp_path, "refuse")
    assert caught.value.found == name


def test_a_file_that_was_never_finished_is_no_run(tmp_path):
    """The first attempt was killed while it wrote run.json."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json.part").write_text("{")
    assert begin_attempt(tmp_path / "run", "refuse") == tmp_path / "run"


def test_the_setting_is_one_of_two():
    from mindspeed_precision.config import load_settings

    assert load_settings().restart == "refuse"
    assert load_settings(overrides=["restart=continue"]).restart == "continue"
    with pytest.raises(ConfigError, match="restart"):
        load_settings(overrides=["restart=overwrite"])


def test_an_attempt_of_this_process_that_failed_is_gone_on_with(tmp_path):
    """A wrapper calls the training again in one process."""
    assert begin_attempt(tmp_path / "run", "refuse") == tmp_path / "run"
    write_manifest(tmp_path / "run", {})
    assert begin_attempt(tmp_path / "run", "refuse").name == "restart01"
    end_attempt(tmp_path / "run")
    with pytest.raises(DumpError, match="not empty"):
        begin_attempt(tmp_path / "run", "refuse")


def test_a_torn_attempt_does_not_spoil_the_others(tmp_path):
    write(tmp_path / "run", [0, 1])
    restart = write(tmp_path / "run", [1, 2], mark=1)
    index = restart / "rank00000" / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-9])
    assert said(tmp_path / "run") == [(-1, 0), (0, 0), (1, 1)]
    shutil.rmtree(restart / "rank00000")
    assert said(tmp_path / "run") == [(-1, 0), (0, 0), (1, 0)]
    (restart / "run.json").write_text(json.dumps({"schema": 99}))
    with pytest.raises(DumpError, match="another schema"):
        load_run(tmp_path / "run")
