"""Ranges of a distributed optimizer fold by themselves, and the answer is that of runs in memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from changing import copied, cut_off, of, rewritten, without, without_seal

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_in_full
from mindspeed_precision.records import Verdict
from mindspeed_precision.report.facts import report_facts
from mindspeed_precision.testing.folded import folded, told
from mindspeed_precision.testing.scale_runs import Fault, ScaleRun, write_scale_run

RUN = ScaleRun(tp=2, pp=2, dp=4, distributed=True)
RANGES = ("reduce", "clip", "optimizer")


def of_ranges(phase: str) -> bool:
    return phase in RANGES


def no_number(role: str) -> bool:
    return role != "hyperparameter"


PLANTS = {
    "healthy": [],
    "a range of a rank": [((4,), of(phase="optimizer", role="exp_avg", step=0))],
    "all ranges": [(None, of(phase="optimizer", role="exp_avg_sq", step=1))],
    "a reduction": [((2, 3), of(phase="reduce", step=0))],
    "all reductions": [(None, of(phase="reduce", step=1))],
    "clipping of one, states of another": [
        ((0,), of(phase="clip", role="main_grad", step=0)),
        ((7, 9), of(phase="optimizer", role="exp_avg", step=1)),
    ],
    "learning rate": [(None, of(role="hyperparameter", slot="lr", step=1))],
    "a parameter of a rank": [((5,), of(phase="optimizer", role="param", step=0))],
    "one layer's gradient, and all after it": [
        ((8,), of(phase="accumulate", slot="after", step=0, fqn=lambda name: name.endswith("fc1.weight"))),
        (None, of(phase=of_ranges, role=no_number, step=0)),
        (None, of(step=1, phase=lambda phase: phase not in ("init", "batch"), role=no_number)),
    ],
}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scale_run(tmp_path_factory.mktemp("ranges") / "baseline", RUN)


@pytest.mark.parametrize("name", PLANTS)
def test_ranges_that_differ_give_the_same_answer_folded(baseline, tmp_path, name):
    candidate = copied(baseline, tmp_path / "candidate", *PLANTS[name])
    whole, less = compare_in_full(baseline, candidate), folded(baseline, candidate)
    assert told(less) == told(whole)
    assert less.diagnosis == whole.diagnosis
    assert len(less.diagnosis.comparisons) < len(whole.diagnosis.comparisons)
    facts = report_facts(whole.diagnosis, whole.runs)
    others = report_facts(less.diagnosis, less.runs, folded=less.folded)
    assert (others.answer, others.runs, others.curves) == (facts.answer, facts.runs, facts.curves)
    assert (others.growth, others.gemms) == (facts.growth, facts.gemms)


@pytest.mark.parametrize("fault", [None, Fault(step=0, dp=1), Fault(step=1, dp=3, tp=1, layer=1)])
def test_a_fault_in_a_forward_gives_the_same_answer_folded(baseline, tmp_path, fault):
    candidate = write_scale_run(tmp_path / "candidate", replace(RUN, fault=fault))
    whole, less = compare_in_full(baseline, candidate), folded(baseline, candidate, jobs=2)
    assert told(less) == told(whole)
    assert less.diagnosis == whole.diagnosis


def test_healthy_replicas_are_one_class_and_so_are_the_ranges_of_a_parameter(baseline, tmp_path):
    found = folded(baseline, copied(baseline, tmp_path / "candidate"))
    assert found.folded.stand_ins.ranks == {0: tuple(range(8)), 8: tuple(range(8, 16))}
    names = [name for _, name in found.folded.stand_ins.ranges]
    assert len(names) == len(set(names))
    declared = {p.fqn for rank in (0, 8) for p in load_run(baseline).ranks[rank].parameters}
    assert set(names) == declared
    assert found.diagnosis.status is Verdict.IDENTICAL


@pytest.mark.parametrize("change", [without_seal, cut_off], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ["healthy", "a reduction"])
def test_what_a_crash_leaves_is_told_as_it_is_of_runs_in_memory(baseline, tmp_path, change, name):
    candidate = change(copied(baseline, tmp_path / "candidate", *PLANTS[name]), 5)
    less = folded(baseline, candidate)
    assert told(less) == told(compare_in_full(baseline, candidate))
    assert less.folded.stand_ins.ranks[5] == (5,)


@pytest.mark.parametrize(
    "lacking",
    [
        of(phase="optimizer", role="exp_avg", fqn=lambda name: "fc1" in name),
        of(phase="optimizer", role="param", step=1, fqn=lambda name: "fc1" in name),
        of(phase="dgrad", role="grad_output", fqn=lambda name: name.endswith("fc2")),
    ],
    ids=["of ranges", "beside ranges", "of all replicas"],
)
@pytest.mark.parametrize("ranks", [(2, 3), range(6)], ids=["of a replica", "of several"])
def test_records_that_one_run_lacks_give_the_same_answer_folded(baseline, tmp_path, lacking, ranks):
    candidate = copied(baseline, tmp_path / "candidate")
    for rank in ranks:
        without(candidate / f"rank{rank:05d}", lacking)
    found = [compare_in_full(baseline, candidate), folded(baseline, candidate)]
    one, two = (replace(one.diagnosis, unmatched=()) for one in found)  # they are those of the ranks kept
    assert one == two
    assert one.coverage.unmatched > 0


def test_a_rank_with_other_ranges_in_the_other_run_stands_for_itself(baseline, tmp_path):
    candidate = copied(baseline, tmp_path / "candidate")
    assert rewritten(candidate / "rank00004", shifted)
    whole, less = compare_in_full(baseline, candidate), folded(baseline, candidate)
    assert told(less) == told(whole)
    assert less.folded.stand_ins.ranks[4] == (4,)
    assert whole.diagnosis.status is not Verdict.IDENTICAL


def shifted(line: bytes) -> bytes:
    """Move the range of a reduced gradient by one element."""
    if b'"phase":"reduce"' not in line:
        return line
    plain = json.loads(line)
    first, last = (int(number) + 1 for number in plain["slot"].split(":"))
    plain["slot"] = f"{first}:{last}"
    plain["part"] = [first, last]
    return json.dumps(plain, separators=(",", ":")).encode()


def test_a_range_of_another_size_than_it_says_is_for_the_strict_reader(baseline, tmp_path):
    candidate = copied(baseline, tmp_path / "candidate")
    copied(baseline, tmp_path / "baseline")
    for run in (tmp_path / "baseline", candidate):
        assert rewritten(run / "rank00003", longer)
    less = folded(tmp_path / "baseline", candidate)
    assert told(less) == told(compare_in_full(tmp_path / "baseline", candidate))
    assert less.folded.stand_ins.ranks[3] == (3,)


def longer(line: bytes) -> bytes:
    """Let a range end later than its elements do."""
    return re.sub(rb'"part":\[(\d+),(\d+)\]', rb'"part":[\1,1\2]', line)


def test_ranges_that_memory_does_not_hold_are_named_and_never_called_aligned(baseline, tmp_path):
    candidate = copied(
        baseline, tmp_path / "candidate", (None, of(phase="optimizer", role="exp_avg", step=1))
    )
    few = folded(baseline, candidate, memory=1).diagnosis
    assert few.status is Verdict.DIVERGED
    [finding] = [found for found in few.findings if found.id == "coverage.ranks_not_linked"]
    assert "compared bit for bit at most" in finding.title
    healthy = folded(baseline, copied(baseline, tmp_path / "healthy"), memory=1).diagnosis
    assert healthy.status is Verdict.IDENTICAL
    assert any("memory does not hold these ranks" in note for note in healthy.notes)
