"""A run equals itself, and no order of ranks, files or sides changes the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_precision.align import align
from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Verdict
from mindspeed_precision.testing.fake_runs import LINEAR, nudged, plant, scaled, write_fake_run


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Run, Run]:
    directory = tmp_path_factory.mktemp("pair")
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=1, value=scaled(2))
    extra = plant(phase="fprop", role="output", fqn="decoder.layers.0", step=1, microbatch=0, drop=True)
    one = write_fake_run(directory / "one", ranks=2)
    two = write_fake_run(directory / "two", ranks=2, plants=[fault, extra])
    return load_run(one), load_run(two)


def test_a_run_is_identical_to_itself(pair):
    for run in pair:
        diagnosis = compare_runs(run, run)
        assert diagnosis.status is Verdict.IDENTICAL
        assert diagnosis.findings == ()
        assert diagnosis.coverage.matched == diagnosis.coverage.records


def test_alignment_is_symmetric(pair):
    one, two = align(*pair), align(pair[1], pair[0])
    assert {(p.rank, p.key) for p in one.pairs} == {(p.rank, p.key) for p in two.pairs}
    assert {(u.rank, u.key) for u in one.unmatched} == {(u.rank, u.key) for u in two.unmatched}
    assert {u.side for u in one.unmatched} != {u.side for u in two.unmatched}


def test_first_divergence_does_not_depend_on_the_order_of_ranks(pair):
    def reversed_ranks(run: Run) -> Run:
        return replace(run, ranks=dict(reversed(run.ranks.items())))

    plain = compare_runs(*pair)
    turned = compare_runs(*(reversed_ranks(run) for run in pair))
    assert turned.origins == plain.origins
    assert turned.findings == plain.findings


def test_first_divergence_does_not_depend_on_the_order_in_memory(pair):
    def reversed_records(run: Run) -> Run:
        ranks = {n: replace(rank, records=rank.records[::-1]) for n, rank in run.ranks.items()}
        return replace(run, ranks=ranks)

    assert compare_runs(*(reversed_records(run) for run in pair)).origins == compare_runs(*pair).origins


def test_sides_can_be_exchanged(pair):
    one, two = compare_runs(*pair), compare_runs(pair[1], pair[0])
    assert [origin.key for origin in one.origins] == [origin.key for origin in two.origins]
    assert one.diverged == two.diverged


def test_smallest_difference_is_seen(tmp_path):
    fault = plant(phase="optimizer", role="exp_avg_sq", fqn=f"{LINEAR}.bias", step=1, value=nudged(5))
    one, two = write_fake_run(tmp_path / "one"), write_fake_run(tmp_path / "two", plants=[fault])
    diagnosis = compare_runs(one, two)
    assert diagnosis.status is Verdict.DIVERGED
    assert diagnosis.first_divergence.key.role.value == "exp_avg_sq"
