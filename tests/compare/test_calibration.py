"""Bounds from a perturbed run: sharper than a policy, silent on a healthy pair, honest about their gaps."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_precision.align import align
from mindspeed_precision.compare import Calibration, calibrate, load_policy
from mindspeed_precision.compare.calibration import FACTOR, FEWEST, FLOOR
from mindspeed_precision.compare.policy import Limit
from mindspeed_precision.compare.reach import Reach
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.records import Comparison, Level, Phase, RecordKey, Role, Verdict
from mindspeed_precision.report.console import render
from mindspeed_precision.report.exit_status import exit_status
from mindspeed_precision.report.verdict_json import verdict
from mindspeed_precision.testing.fake_runs import LINEAR, plant, rounded, scaled, write_fake_run

OTHER_ORDER = tuple(
    plant(phase=phase, role=role, value=rounded(seed, roundings=0.5))
    for seed, (phase, role) in enumerate((("fprop", "output"), ("dgrad", "grad_input"), ("wgrad", "?grad")))
)
SMALL = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=scaled(1 + 10 * 2.0**-23))
"""Between the calibrated bound, 4e-7 to 8e-7 by the machine's matrix library, and the policy's of 1.6e-6."""
NOISE = {"settings": {"perturb": {"epsilon": "auto", "seed": 0, "fqn": "*"}}}


def perturbed(directory, *, seed=0, noise=NOISE, roundings=1.0, **changes):
    """Write what a run with noise on its parameters leaves."""
    plants = [plant(phase="init", role="param", value=rounded(seed, roundings=roundings))]
    return write_fake_run(directory, plants=plants, manifest=noise, **{"level": Level.TENSOR, **changes})


def runs(directory, *faults, level=Level.TENSOR, **changes):
    """Write a baseline, a candidate whose kernels sum in another order, and a perturbed baseline."""
    one = write_fake_run(directory / "one", level=level, **changes)
    two = write_fake_run(directory / "two", level=level, plants=[*OTHER_ORDER, *faults], **changes)
    return one, two, perturbed(directory / "noisy", level=level, **changes)


@pytest.mark.parametrize("level", [Level.TENSOR, Level.SKETCH, Level.STATISTICS])
def test_a_healthy_pair_stays_healthy(level, tmp_path):
    one, two, noisy = runs(tmp_path, level=level)
    diagnosis = compare_runs(one, two, calibrate=[noisy])
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()
    assert "cross_layout" in diagnosis.policy
    said = [c for c in diagnosis.comparisons if "calibrated" in c.reason]
    assert len(said) > 20
    (note,) = [note for note in diagnosis.notes if "are calibrated" in note]
    assert f"bounds of {len([c for c in diagnosis.comparisons if judged(c)])} records" in note
    assert "noise of epsilon=auto, seed 0" in note
    assert any("fewer than 16 elements" in note for note in diagnosis.notes)


def judged(comparison):
    """Tell whether a comparison has a calibrated bound: it differs, is large enough, and is no copy."""
    differs = comparison.verdict in (Verdict.WITHIN_TOLERANCE, Verdict.DIVERGED)
    return differs and comparison.pair.candidate.numel >= FEWEST


def test_a_fault_below_the_bounds_of_the_policy_is_found(tmp_path):
    one, two, noisy = runs(tmp_path, SMALL)
    fixed = compare_runs(one, two, policy="cross_layout")
    assert fixed.status is Verdict.WITHIN_TOLERANCE, render(fixed)
    diagnosis = compare_runs(one, two, policy="cross_layout", calibrate=[noisy])
    first = diagnosis.first_divergence
    assert (first.key.fqn, first.key.role, first.key.step) == (LINEAR, Role.WGRAD, 0)
    assert "(calibrated)" in first.comparison.reason
    assert verdict(diagnosis)["first_divergence"]["reason"].endswith("(calibrated)")
    assert exit_status(diagnosis)[0] == 1


def test_a_perturbed_run_is_not_judged_as_a_plain_one(tmp_path):
    one, two, noisy = runs(tmp_path)
    for pair, side in (((one, noisy), "candidate"), ((noisy, two), "baseline")):
        diagnosis = compare_runs(*pair, policy="cross_layout")
        (finding,) = [f for f in diagnosis.findings if f.id == "config.perturbed"]
        assert finding.evidence == (f"the {side}: noise of epsilon=auto, seed 0",)
        assert exit_status(diagnosis)[0] == 1
        assert {origin.key for origin in diagnosis.origins} == set(finding.explains)


def test_what_cannot_calibrate_is_one_clear_error(tmp_path):
    one, two, noisy = runs(tmp_path)
    with pytest.raises(ConfigError, match="was not perturbed"):
        compare_runs(one, two, calibrate=[two])
    still = write_fake_run(tmp_path / "still", level=Level.TENSOR, manifest=NOISE)
    with pytest.raises(ConfigError, match="moved no record"):
        compare_runs(one, two, calibrate=[still])
    with pytest.raises(ConfigError, match="leaves nothing to calibrate"):
        compare_runs(one, two, policy="exact", calibrate=[noisy])


def test_what_is_not_covered_keeps_the_bounds_of_the_policy(tmp_path):
    one, two, _ = runs(tmp_path, steps=3)
    short = perturbed(tmp_path / "short", steps=1)
    diagnosis = compare_runs(one, two, calibrate=[short])
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE
    for comparison in diagnosis.comparisons:
        assert ("calibrated" in comparison.reason) <= (comparison.key.step == 0)
    count = sum(judged(c) and c.key.step > 0 for c in diagnosis.comparisons)
    assert f"{count} records are of a step that no perturbed run has: bounds of the policy" in diagnosis.notes


def test_what_rounding_alone_changes_is_named(tmp_path):
    one, two, _ = runs(tmp_path)
    wild = perturbed(tmp_path / "wild", roundings=2.0**22)
    diagnosis = compare_runs(one, two, calibrate=[wild])
    assert any("nothing shows in them" in note and "layers" in note for note in diagnosis.notes)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pairs")
    one, two, _ = (load_run(path) for path in runs(directory))
    found = [p for p in align(one, two).pairs if (p.key.phase, p.key.role) == (Phase.WGRAD, Role.WGRAD)]
    return [p for p in found if p.key.fqn == LINEAR and p.key.step == 0]


METRIC = "rel_frobenius"
LIMIT = Limit(metric=METRIC, maximum=1e-5)
DISTANCES = st.lists(st.tuples(st.integers(0, 9), st.floats(1e-9, 1e-3)), min_size=1, max_size=30)


def at_layer(pair, layer):
    sides = (
        replace(side, key=replace(side.key, fqn=f"decoder.layers.{layer}.mlp.linear_fc1"))
        for side in (pair.baseline, pair.candidate)
    )
    one, two = sides
    return replace(pair, baseline=one, candidate=two)


def measured(pair, distances) -> Calibration:
    compared = [
        Comparison(
            pair=at_layer(pair, layer), verdict=Verdict.DIVERGED, metrics={METRIC: size}, reason="noise"
        )
        for layer, size in distances
    ]
    return calibrate(["noisy"], compared, [LIMIT])


@given(distances=DISTANCES)
def test_a_reference_is_no_lucky_small_distance(distances, pairs):
    found = measured(pairs[0], distances)
    middle = median(size for _, size in distances)
    for layer, size in distances:
        reference = found.reference(at_layer(pairs[0], layer), METRIC)
        near = [other for at, other in distances if abs(at - layer) <= 1]
        assert reference == max(*near, middle)
        assert reference >= size
        bound = found.apply(at_layer(pairs[0], layer), LIMIT)
        assert bound.maximum == max(FACTOR * reference, FLOOR * UNIT_ROUNDOFF["float32"])
        assert bound.source == "calibrated"


@given(distances=DISTANCES, more=DISTANCES)
def test_another_perturbed_run_lowers_no_largest_distance(distances, more, pairs):
    one, two = measured(pairs[0], distances), measured(pairs[0], [*distances, *more])
    for kind, places in one.samples.items():
        for place, size in places.items():
            assert two.samples[kind][place] >= size


def test_a_layer_without_neighbours_and_another_kind_are_not_covered(pairs):
    found = measured(pairs[0], [(0, 1e-6)])
    assert found.reference(at_layer(pairs[0], 1), METRIC) == 1e-6
    assert found.reference(at_layer(pairs[0], 5), METRIC) is None
    assert found.apply(at_layer(pairs[0], 5), LIMIT) == LIMIT
    assert found.reference(at_layer(pairs[0], 0), "max_ratio") is None


def test_updates_are_only_bounded_more_tightly(pairs):
    share = Limit(metric="update_share", maximum=0.02)
    for size, maximum in ((1e-9, 0.02 / 8), (0.001, FACTOR * 0.001), (0.1, 0.02)):  # the first one was lucky
        compared = [
            Comparison(pair=pairs[0], verdict=Verdict.DIVERGED, metrics={"update_share": size}, reason="")
        ]
        bound = calibrate(["noisy"], compared, [share]).apply(pairs[0], share)
        assert bound.maximum == pytest.approx(maximum)


def test_an_element_whose_gradient_is_noise_keeps_its_bound(pairs):
    """How far one moved in the perturbed run is luck: Adam moves it by up to the learning rate."""
    limit = Limit(metric="noise_update_ratio", maximum=1.1)
    compared = [Comparison(pair=pairs[0], verdict=Verdict.DIVERGED, metrics={limit.metric: 1e-3}, reason="")]
    assert calibrate(["noisy"], compared, [limit]).apply(pairs[0], limit) == limit


def test_every_bound_of_the_policies_is_of_a_known_kind():
    metrics = {
        limit.metric for name in ("cross_layout", "cross_framework") for limit in load_policy(name).limits
    }
    relative = {"rel_frobenius", "max_ratio", "worst_rows_ratio", "norm_change", "extreme_change"}
    updates = {"update_share", "norm_update_share", "sketch_update_least"}
    assert metrics == relative | updates | {"noise_update_ratio"}


@pytest.mark.parametrize(("forced", "reference"), [((), 3e-6), ((2,), 2e-6), ((1, 2), 3e-6)])
def test_a_step_that_takes_a_state_is_measured_from_there(forced, reference, pairs):
    """What a step is measured by are steps that are no further from a state that both runs had."""
    steps = [at_step(pairs[0], step) for step in range(3)]
    compared = [
        Comparison(pair=pair, verdict=Verdict.DIVERGED, metrics={METRIC: size}, reason="noise")
        for pair, size in zip(steps, (1e-6, 3e-6, 2e-6), strict=True)
    ]
    reach = Reach(rates={}, first=0, rate=0.0, amplification=1.0, note="", forced=frozenset(forced))
    found = calibrate(["noisy"], compared, [LIMIT], start_of=reach.start_of)
    assert found.reference(steps[2], METRIC) == reference
    left = calibrate(["noisy"], compared[:2], [LIMIT], start_of=reach.start_of, unlike={2})
    assert left.apply(steps[2], LIMIT) == LIMIT
    assert "no perturbed run began as the candidate did" in left.uncovered(steps[2])


def test_what_the_clip_factor_multiplies_may_be_off_by_it(pairs):
    """The norm of all gradients is off by luck more in one run than in another, and all of them with it."""
    key = replace(pairs[0].baseline.key, phase=Phase.REDUCE, role=Role.REDUCED_GRAD)
    compared = [measured_at(pairs[0], key, 1e-6)]
    bounds = []
    for phase, role in (
        (Phase.REDUCE, Role.REDUCED_GRAD),
        (Phase.CLIP, Role.MAIN_GRAD),
        (Phase.OPTIMIZER, Role.EXP_AVG_SQ),
    ):
        own = measured_at(pairs[0], replace(key, phase=phase, role=role), 1e-6)
        found = calibrate(["noisy"], [*compared, own], [LIMIT])
        bounds.append(found.apply(own.pair, LIMIT).maximum)
    assert bounds == pytest.approx([4e-6, 8e-6, 12e-6])


def measured_at(pair, key, size):
    one, two = (replace(side, key=key) for side in (pair.baseline, pair.candidate))
    pair = replace(pair, baseline=one, candidate=two)
    return Comparison(pair=pair, verdict=Verdict.DIVERGED, metrics={METRIC: size}, reason="noise")


def at_step(pair, step):
    one, two = (replace(side, key=replace(side.key, step=step)) for side in (pair.baseline, pair.candidate))
    return replace(pair, baseline=one, candidate=two)


@pytest.mark.parametrize(
    ("step", "policy", "allowed"),
    [(0, 1.0, 4e-3), (1, 1.0, 64e-3), (7, 1.0, 64e-3), (1, 0.01, 0.01), (1, 1e-3, 4e-3)],
)
def test_behind_an_update_more_is_allowed_up_to_the_bound_of_the_policy(step, policy, allowed):
    key = RecordKey(step=step, microbatch=0, phase=Phase.WGRAD, fqn=LINEAR, role=Role.WGRAD)
    limit = Limit(metric="rel_frobenius", maximum=policy)
    assert Calibration(runs=()).allowed(key, limit, 1e-3) == allowed
    forced = Calibration(runs=(), start_of=lambda step: step)
    assert forced.allowed(key, limit, 1e-3) == 4e-3  # each step begins with one state
