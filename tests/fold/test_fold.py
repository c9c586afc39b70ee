"""Folded runs give the answer that runs in memory give, bit for bit, and say what they did not look at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from changing import cut_off, without_seal

from mindspeed_precision.cli import main
from mindspeed_precision.dump.reader import load_rank, load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.engines import Resources
from mindspeed_precision.errors import DumpError, IncomparableError
from mindspeed_precision.flow import compare_in_full
from mindspeed_precision.records import Verdict
from mindspeed_precision.report.exit_status import exit_status
from mindspeed_precision.report.facts import report_facts
from mindspeed_precision.testing.fake_runs import (
    LINEAR,
    constant,
    nudged,
    permuted,
    plant,
    scaled,
    transposed_layout,
    write_fake_run,
)
from mindspeed_precision.testing.folded import folded, smallest, told
from mindspeed_precision.testing.scale_runs import Fault, ScaleRun, write_scale_run

HEALTHY = ScaleRun(tp=2, pp=2, dp=3)

PLANTS = {
    "nothing": [],
    "dW of a rank": [plant(role="wgrad", fqn=LINEAR, rank=2, value=nudged())],
    "dW everywhere": [plant(role="wgrad", fqn=LINEAR, value=scaled(2))],
    "output of a rank": [plant(role="output", fqn=LINEAR, rank=1, step=1, value=nudged())],
    "reduction of a rank": [plant(role="reduced_grad", step=1, rank=3, value=scaled(2))],
    "batches": [plant(role="batch", slot="tokens", value=permuted())],
    "batches of a rank": [plant(role="batch", slot="tokens", rank=1, value=permuted())],
    "random state": [plant(role="rng", value=lambda state: state ^ 1)],
    "NaN": [plant(role="output", fqn=LINEAR, rank=2, step=1, microbatch=0, value=constant(np.nan))],
    "learning rate": [plant(role="hyperparameter", slot="lr", value=scaled(2))],
    "a record that is lacking": [plant(role="wgrad", fqn=f"{LINEAR}.weight", drop=True)],
    "one that a rank lacks": [plant(role="grad_output", fqn=LINEAR, rank=1, drop=True)],
    "loss": [plant(role="loss", phase="loss", microbatch=1, value=scaled(1.01))],
    "norm": [plant(role="grad_norm", step=0, value=scaled(1.01))],
    "layout": [
        plant(role="grad_output", phase="wgrad", fqn=LINEAR, layout=transposed_layout),
        plant(role="wgrad", fqn=LINEAR, value=nudged()),
    ],
    "stale sum": [
        plant(role="main_grad", slot="before", fqn=f"{LINEAR}.weight", microbatch=1, rank=2, value=nudged())
    ],
}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scale_run(tmp_path_factory.mktemp("scale") / "baseline", HEALTHY)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("trained") / "baseline", ranks=4, payloads="-")


def with_fault(directory: Path, fault: Fault | None) -> Path:
    return write_scale_run(directory, ScaleRun(tp=2, pp=2, dp=3, fault=fault))


@pytest.mark.parametrize(
    "fault",
    [None, Fault(step=0), Fault(step=1, dp=2, tp=1, layer=1)],
    ids=["healthy", "first", "last"],
)
def test_a_layout_of_three_kinds_of_parallelism_gives_the_same_answer_folded(baseline, tmp_path, fault):
    candidate = with_fault(tmp_path / "candidate", fault)
    whole, less = compare_in_full(baseline, candidate), folded(baseline, candidate)
    assert told(less) == told(whole)
    assert less.diagnosis == whole.diagnosis
    assert len(less.baseline.ranks) < len(whole.baseline.ranks) == 12
    facts = report_facts(whole.diagnosis, whole.runs)
    others = report_facts(less.diagnosis, less.runs, folded=less.folded)
    assert (others.answer, others.runs, others.curves) == (facts.answer, facts.runs, facts.curves)
    assert (others.growth, others.gemms) == (facts.growth, facts.gemms)
    assert "12 ranks were read" in others.gaps[0]


@pytest.mark.parametrize(
    ("name", "unwritten"),
    [
        *((name, ()) for name in PLANTS),
        *((name, [f"{LINEAR}.weight"]) for name in ("nothing", "dW of a rank", "one that a rank lacks")),
    ],
)
def test_a_trained_run_gives_the_same_answer_folded(trained, tmp_path, name, unwritten):
    candidate = write_fake_run(
        tmp_path / "candidate", ranks=4, payloads="-", plants=PLANTS[name], unwritten=frozenset(unwritten)
    )
    assert told(folded(trained, candidate)) == told(compare_in_full(trained, candidate))


def test_healthy_replicas_are_one_class(trained, tmp_path):
    candidate = write_fake_run(tmp_path / "candidate", ranks=4, payloads="-")
    assert folded(trained, candidate).folded.stand_ins.ranks == {0: (0, 1, 2, 3)}


def test_a_rank_whose_elements_were_kept_stands_for_itself(tmp_path):
    runs = [write_fake_run(tmp_path / name, ranks=2, payloads=LINEAR) for name in "ab"]
    assert folded(*runs).folded.stand_ins.ranks == {0: (0,), 1: (1,)}


def test_two_processes_give_what_one_gives(baseline, tmp_path):
    candidate = with_fault(tmp_path / "candidate", Fault(step=1, dp=1))
    assert told(folded(baseline, candidate, jobs=2)) == told(folded(baseline, candidate))


def broken(run: Path, rank: int) -> Path:
    """Change one digit of a fingerprint of a sealed index."""
    index = run / f"rank{rank:05d}" / "index.jsonl"
    data = bytearray(index.read_bytes())
    at = data.index(b'"fingerprint":"', 5000) + 20
    data[at] = ord("0") if data[at] != ord("0") else ord("1")
    index.write_bytes(data)
    return run


def without_rank(run: Path, rank: int) -> Path:
    shutil.rmtree(run / f"rank{rank:05d}")
    return run


def another_rank(run: Path, rank: int) -> Path:
    shutil.copytree(run / "rank00000", without_rank(run, rank) / f"rank{rank:05d}")
    return run


def empty_rank(run: Path, rank: int) -> Path:
    (without_seal(run, rank) / f"rank{rank:05d}" / "index.jsonl").write_bytes(b"")
    return run


def found_something(run: Path, rank: int) -> Path:
    finding = {"id": "coverage.capture_ended", "severity": "warning", "title": "capture ended", "remedy": ""}
    text = json.dumps({"schema": 4, "findings": [finding]})
    (run / f"rank{rank:05d}" / "findings.json").write_text(text)
    return run


@pytest.mark.parametrize(
    ("change", "side"),
    [(without_seal, 0), (cut_off, 1), (without_rank, 0), (empty_rank, 1), (found_something, 0)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_what_a_crash_leaves_is_told_as_it_is_of_runs_in_memory(baseline, tmp_path, change, side):
    runs = [baseline, with_fault(tmp_path / "candidate", Fault(step=1, dp=1))]
    runs[side] = change(Path(shutil.copytree(runs[side], tmp_path / "changed")), 5)
    assert told(folded(*runs)) == told(compare_in_full(*runs))


@pytest.mark.parametrize("change", [broken, another_rank], ids=lambda one: one.__name__)
def test_a_damaged_file_is_refused_as_it_is_of_runs_in_memory(baseline, tmp_path, change):
    runs = [baseline, change(Path(shutil.copytree(baseline, tmp_path / "changed")), 5)]
    with pytest.raises(DumpError) as whole:
        compare_in_full(*runs)
    for jobs in (1, 2):
        with pytest.raises(DumpError) as less:
            folded(*runs, jobs=jobs)
        assert str(less.value) == str(whole.value)


def test_another_model_is_refused_as_it_is_of_runs_in_memory(baseline, tmp_path):
    other = write_scale_run(tmp_path / "other", ScaleRun(tp=2, pp=2, dp=3, hidden=32))
    with pytest.raises(IncomparableError) as whole:
        compare_in_full(baseline, other)
    with pytest.raises(IncomparableError) as less:
        folded(baseline, other)
    assert str(less.value) == str(whole.value)


def test_ranks_that_memory_does_not_hold_are_named_and_never_called_aligned(baseline, tmp_path):
    candidate = with_fault(tmp_path / "candidate", Fault(step=1, dp=1))
    few = folded(baseline, candidate, memory=3_000_000).diagnosis
    whole = compare_in_full(baseline, candidate).diagnosis
    assert few.status is Verdict.DIVERGED
    assert few.first_divergence.key == whole.first_divergence.key
    [finding] = [found for found in few.findings if found.id == "coverage.ranks_not_linked"]
    assert "ranks were compared bit for bit at most" in finding.title
    healthy = with_fault(tmp_path / "healthy", None)
    assert "coverage.ranks_not_linked" not in {f.id for f in folded(baseline, healthy).diagnosis.findings}


def test_a_rank_that_memory_does_not_hold_and_that_lacks_a_record_is_not_aligned(trained, tmp_path):
    lacking = [plant(role="wgrad", fqn=f"{LINEAR}.weight", rank=2, drop=True)]
    candidate = write_fake_run(tmp_path / "candidate", ranks=4, payloads="-", plants=lacking)
    found = folded(trained, candidate, memory=1).diagnosis
    assert found.status is Verdict.MISSING
    assert exit_status(found)[0] == 2
    assert [finding.id for finding in found.findings] == ["coverage.ranks_not_linked"]
    healthy = write_fake_run(tmp_path / "healthy", ranks=4, payloads="-")
    assert exit_status(folded(trained, healthy, memory=1).diagnosis) == (0, "")


def test_ranks_that_stand_for_themselves_and_are_left_out_are_named(tmp_path):
    """Of a rank whose elements were kept it is not known what differs until it is loaded."""
    one, two = (write_fake_run(tmp_path / name, ranks=3, payloads=LINEAR) for name in "ab")
    found = folded(one, two, memory=1).diagnosis
    assert (found.status, exit_status(found)[0]) == (Verdict.MISSING, 2)
    assert folded(one, two).diagnosis.status is Verdict.IDENTICAL


def test_the_first_rank_that_differs_is_kept_whatever_memory_holds(trained, tmp_path):
    baseline = without_seal(Path(shutil.copytree(trained, tmp_path / "baseline")), 0)
    candidate = write_fake_run(tmp_path / "candidate", ranks=4, payloads="-", plants=PLANTS["dW of a rank"])
    without_seal(candidate, 0)
    few, whole = folded(baseline, candidate, memory=1), compare_in_full(baseline, candidate)
    assert few.diagnosis.first_divergence.key == whole.diagnosis.first_divergence.key
    assert whole.diagnosis.findings[0].id in {finding.id for finding in few.diagnosis.findings}


def test_runs_whose_records_are_judged_one_by_one_are_loaded_and_that_is_said(baseline, tmp_path):
    candidate = with_fault(tmp_path / "candidate", Fault(step=1, dp=1))
    small = Resources(memory=smallest(baseline, candidate), jobs=1)
    found = compare_in_full(baseline, candidate, policy="cross_layout", resources=small)
    assert found.folded is None
    assert "policy cross_layout judges every record by itself" in found.note


def test_other_layouts_are_put_together_in_memory(baseline, tmp_path):
    other = write_scale_run(tmp_path / "other", ScaleRun(tp=2, pp=1, dp=3, layers=2))
    small = Resources(memory=smallest(baseline, other), jobs=1)
    found = compare_in_full(baseline, other, resources=small)
    assert found.folded is None
    assert "their parallel layouts differ" in found.note


def test_a_run_that_was_restarted_is_put_together_in_memory(baseline, tmp_path):
    again = write_scale_run(tmp_path / "again", HEALTHY)
    small = Resources(memory=smallest(baseline, again), jobs=1)
    shutil.copytree(again, again / "restart01")
    found = compare_in_full(baseline, again, resources=small)
    assert found.folded is None
    assert "one was restarted" in found.note


def test_the_command_folds_and_says_so(baseline, tmp_path, capsys):
    candidate = with_fault(tmp_path / "candidate", Fault(step=1, dp=1))
    size = f"{smallest(baseline, candidate)}"
    words = ["compare", str(baseline), str(candidate), "--out", str(tmp_path / "out"), "--jobs", "1"]
    assert main([*words, "--memory", size]) == 1
    assert "12 ranks were read and compared" in capsys.readouterr().err
    first = (tmp_path / "out" / "verdict.json").read_text()
    assert main(words) == 1
    assert (tmp_path / "out" / "verdict.json").read_text() == first


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--memory", "much"),
        ("--memory", "2GB"),
        ("--memory", ""),
        ("--jobs", "0"),
        ("--jobs", "all"),
        ("--jobs", "9" * 5000),
    ],
)
def test_options_that_are_no_numbers_are_refused(baseline, capsys, option, value):
    assert main(["compare", str(baseline), str(baseline), option, value]) == 2
    assert option in capsys.readouterr().err


def test_a_synthetic_run_is_what_the_writer_writes(baseline, tmp_path):
    run = load_run(baseline)
    create_run(tmp_path / "again", run.manifest)
    for number in (0, 7, 11):
        rank = run.ranks[number]
        writer = RankWriter(tmp_path / "again", coordinates=rank.coordinates)
        writer.declare_parameters(rank.parameters)
        for step in rank.steps:
            of_step = [record for record in rank.records if record.key.step == step]
            writer.write_step(step, of_step, {}, microbatches=rank.microbatches[step])
        writer.close(complete=True)
        for file in ("index.jsonl", "COMPLETE"):
            assert (writer.directory / file).read_bytes() == (rank.directory / file).read_bytes()
        assert load_rank(rank.directory).complete
