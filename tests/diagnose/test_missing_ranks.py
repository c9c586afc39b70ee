"""Ranks whose records are not there: what they hold is no agreement, and what nobody asked for is no gap."""

from __future__ import annotations

import shutil

import pytest

from mindspeed_precision import check_run, compare_runs
from mindspeed_precision.dump.writer import update_manifest
from mindspeed_precision.engines import Resources
from mindspeed_precision.records import Verdict
from mindspeed_precision.testing.fake_runs import write_fake_run


@pytest.fixture
def runs(tmp_path):
    return [write_fake_run(tmp_path / name, ranks=2) for name in ("baseline", "candidate")]


@pytest.mark.parametrize("memory", [1, 1 << 31])
@pytest.mark.parametrize("sides", [(0,), (1,), (0, 1)])
def test_a_rank_that_was_lost_is_no_agreement(runs, sides, memory):
    for side in sides:
        shutil.rmtree(runs[side] / "rank00001")
    found = compare_runs(*runs, resources=Resources(memory=memory, jobs=1))
    assert found.status is Verdict.MISSING
    (finding,) = [one for one in found.findings if one.id == "coverage.ranks_missing"]
    names = [("baseline", "candidate")[side] for side in sides]
    assert finding.evidence == tuple(f"{name}: no records of 1 of 2 ranks: 1" for name in names)


def test_a_rank_that_was_not_to_record_is_no_gap(runs):
    for run in runs:
        shutil.rmtree(run / "rank00001")
        update_manifest(run, {"settings": {"ranks": "0"}})
    found = compare_runs(*runs)
    assert found.status is Verdict.IDENTICAL
    assert "coverage.ranks_missing" not in {one.id for one in found.findings}


@pytest.mark.parametrize("memory", [1, 1 << 31])
def test_a_check_names_ranks_that_were_lost(runs, memory):
    shutil.rmtree(runs[0] / "rank00001")
    answers = [check_run(run, resources=Resources(memory=memory, jobs=1)) for run in runs]
    (finding,) = [one for one in answers[0].findings if one.id == "coverage.ranks_missing"]
    assert finding.evidence == ("no records of 1 of 2 ranks: 1",)
    assert not answers[1].findings


def test_a_check_takes_ranks_that_were_not_to_record_for_no_gap(runs):
    shutil.rmtree(runs[0] / "rank00001")
    update_manifest(runs[0], {"settings": {"ranks": "0"}})
    assert "coverage.ranks_missing" not in {one.id for one in check_run(runs[0]).findings}
