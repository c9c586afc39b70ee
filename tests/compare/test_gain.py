"""What the reduction multiplies a gradient by: seen where the gradient itself is too coarse to show it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_precision.align import align
from mindspeed_precision.compare import load_policy, make_context
from mindspeed_precision.compare.gain import Gains
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.record.placement import EMBEDDING_GROUP, TENSOR_GROUP
from mindspeed_precision.records import Level, Phase, Placement, Role
from mindspeed_precision.testing.fake_runs import LINEAR, plant, rounded, scaled, write_fake_run

COARSE = plant(phase="wgrad", role="wgrad", value=rounded(roundings=2.0**17))  # as bfloat16: half a percent
REDUCTION = plant(phase="reduce", role="reduced_grad", fqn=f"{LINEAR}.weight", value=scaled(1.0003))


def with_a_term(run, name, placed):
    """Let a parameter's gradient be one term of a sum over ranks, as a tied embedding's is on a stage."""
    ranks = {
        number: replace(
            rank,
            parameters=tuple(
                replace(p, placement=Placement(shape=p.shape, **placed)) if p.fqn == name else p
                for p in rank.parameters
            ),
        )
        for number, rank in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def changes(directory, *plants, level=Level.STATISTICS, ranks=1, term=None):
    """Return the change of gain of every reduced gradient by name, and the largest change of a norm."""
    one = load_run(write_fake_run(directory / "one", level=level, ranks=ranks))
    two = load_run(write_fake_run(directory / "two", level=level, ranks=ranks, plants=plants))
    if term is not None:
        one, two = (with_a_term(run, f"{LINEAR}.weight", term) for run in (one, two))
    aligned = align(one, two)
    gains = Gains(one, two, aligned.pairs)
    reduced = [p for p in aligned.pairs if (p.key.phase, p.key.role) == (Phase.REDUCE, Role.REDUCED_GRAD)]
    assert reduced
    found = {p.key.fqn: gains.change(p) for p in reduced if p.key.step == 0}
    return {name: gain and gain.change for name, gain in found.items()}


def test_a_coarse_gradient_keeps_its_gain(tmp_path):
    found = changes(tmp_path, COARSE)
    assert all(abs(change) < 1e-6 for change in found.values())


def test_a_scaled_reduction_shows_under_coarse_gradients(tmp_path):
    found = changes(tmp_path, COARSE, REDUCTION)
    assert found.pop(f"{LINEAR}.weight") == pytest.approx(3e-4, rel=1e-2)
    assert all(abs(change) < 1e-6 for change in found.values())


@pytest.mark.parametrize(
    "term", [{"partial": EMBEDDING_GROUP}, {"partial": TENSOR_GROUP}, {"copy_of": "other"}]
)
def test_one_term_of_a_sum_shows_no_gain(term, tmp_path):
    """The other stage's term differs, too: the ratio to this one is no factor of the reduction."""
    found = changes(tmp_path, COARSE, REDUCTION, term=term)
    assert found.pop(f"{LINEAR}.weight") is None
    assert all(abs(change) < 1e-6 for change in found.values())


def test_nothing_is_known_of_a_sum_over_ranks_or_without_norms(tmp_path):
    assert set(changes(tmp_path / "a", REDUCTION, ranks=2).values()) == {None}
    assert set(changes(tmp_path / "b", REDUCTION, level=Level.FINGERPRINT).values()) == {None}


def test_the_policies_of_layouts_alone_look_at_it(tmp_path):
    one = load_run(write_fake_run(tmp_path / "one"))
    pairs = align(one, one).pairs
    bounded = {
        name: any(rule.max_gain_change for rule in load_policy(name).rules)
        for name in ("cross_layout", "cross_framework")
    }
    assert bounded == {"cross_layout": True, "cross_framework": False}
    assert make_context(one, one, pairs, load_policy("cross_layout")).model == "float32"
