"""Gradients and the optimizer in one run: each invariant with a fault, and the same run without it."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.records import Level, Phase
from mindspeed_precision.testing.fake_runs import (
    EMBEDDING,
    HEAD,
    LINEAR,
    constant,
    nudged,
    plant,
    scaled,
    write_fake_run,
)
from mindspeed_precision.verify.check import check_run

WEIGHT = f"{LINEAR}.weight"
BIASES = frozenset({f"{LINEAR}.bias", f"{LINEAR.replace('1', '0', 1)}.bias"})
CONFIG = {
    "megatron_args": {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
    "optimizer_config": {"adam_beta2": 0.95, "clip_grad": 1.0, "decoupled_weight_decay": True},
    "transformer_config": {},
    "ddp_config": {},
}
SHAPE = {
    "steps": 2,
    "level": Level.STATISTICS,
    "payloads": "*",
    "undecayed": BIASES,
    "manifest": {"config": CONFIG, "first_step": 0},
}


def check(directory, *plants, **changes):
    return check_run(write_fake_run(directory, **{**SHAPE, "plants": plants, **changes}))


FAMILIES = ("wgrad.", "accumulate.", "reduce.", "clip.", "optimizer.", "schedule.")


def own(examination):
    """The findings of gradients and of the optimizer; what else `check` says has tests of its own."""
    return [finding for finding in examination.findings if finding.id.startswith(FAMILIES)]


def ids(examination):
    return [finding.id for finding in own(examination)]


def outcomes(examination):
    return {outcome.name: outcome for outcome in examination.outcomes}


def grown(by):
    return lambda value: value + value.dtype.type(by)


def off_by_1e_4(value):
    changed = value.copy()
    changed.flat[9] += np.float32(1e-4)
    return changed


def to_bfloat16(value):
    return (value.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


HEALTHY = {
    "two ranks": {"ranks": 2, "steps": 1},
    "sketch": {"level": Level.SKETCH, "payloads": ""},
    "statistics": {"payloads": ""},
    "fingerprint": {"level": Level.FINGERPRINT, "payloads": ""},
    "into .grad": {"dot_grad": True},
    "frozen": {"frozen": frozenset({f"{EMBEDDING}.weight"})},
    "lr 0": {"lr": 0.0},
    "one microbatch": {"microbatches": 1},
}


def some(cases, short):
    """The names of cases, of which those that are not short run in `make long` alone."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in cases]


@pytest.mark.parametrize("name", some(HEALTHY, {"two ranks", "sketch", "fingerprint"}))
def test_a_healthy_run_gives_nothing(tmp_path, name):
    found = check(tmp_path / "run", **HEALTHY[name])
    assert own(found) == []
    assert not found.vacuous


def test_what_a_healthy_run_exercises(tmp_path):
    found = outcomes(check(tmp_path / "run"))
    for name in (
        "wgrad.missing",
        "wgrad.not_the_product",
        "wgrad.changed_on_the_way",
        "accumulate.not_zero_at_start",
        "accumulate.changed_between",
        "accumulate.count",
        "accumulate.not_the_sum",
        "reduce.not_the_sum",
        "clip.norm_not_of_gradients",
        "clip.wrong_factor",
        "optimizer.state_not_recomputed",
        "optimizer.update_not_recomputed",
        "optimizer.step_counter",
        "optimizer.not_as_configured",
        "optimizer.decay_of_norm_or_bias",
        "optimizer.parameters_unmoved",
    ):
        assert found[name].exercised > 0, name
        assert found[name].failed == 0
        assert found[name].skipped == "", name


FAULTS = {
    "a buffer that is not zeroed": (
        "accumulate.not_zero_at_start",
        [plant(role="main_grad", slot="before", step=1, microbatch=0, rank=0, fqn=WEIGHT, value=grown(1))],
        (1, Phase.ACCUMULATE, WEIGHT, "its norm"),
    ),
    "a buffer that is doubled between microbatches": (
        "accumulate.changed_between",
        [plant(role="main_grad", slot="before", microbatch=1, rank=0, fqn=WEIGHT, value=scaled(2))],
        (0, Phase.ACCUMULATE, WEIGHT, "2 times what it was"),
    ),
    "one element of a sum": (
        "accumulate.not_the_sum",
        [plant(role="main_grad", slot="after", step=1, microbatch=1, rank=0, fqn=WEIGHT, value=nudged())],
        (1, Phase.ACCUMULATE, WEIGHT, "1 of 64 elements differ"),
    ),
    "a dW that is added twice": (
        "accumulate.not_the_sum",
        [plant(role="main_grad", slot="after", step=1, microbatch=0, rank=0, fqn=WEIGHT, value=scaled(2))],
        (1, Phase.ACCUMULATE, WEIGHT, "2 times dW was added"),
    ),
    "a product that is off": (
        "wgrad.not_the_product",
        [plant(role="wgrad", step=1, rank=0, fqn=LINEAR, value=off_by_1e_4)],
        (1, Phase.WGRAD, LINEAR, "row 1 leaves"),
    ),
    "a dW that is doubled after its GEMM": (
        "wgrad.changed_on_the_way",
        [plant(role="wgrad", step=1, rank=0, fqn=WEIGHT, value=scaled(2))],
        (1, Phase.WGRAD, WEIGHT, "2 times what the GEMM gave"),
    ),
    "a dW that is rounded after its GEMM": (
        "wgrad.changed_on_the_way",
        [plant(role="wgrad", step=1, rank=0, fqn=WEIGHT, value=to_bfloat16)],
        (1, Phase.WGRAD, WEIGHT, "rounded to a narrower type"),
    ),
    "a reduction that is scaled": (
        "reduce.not_the_sum",
        [plant(role="reduced_grad", step=1, rank=0, fqn=WEIGHT, value=scaled(2))],
        (1, Phase.REDUCE, WEIGHT, "2 times what it should be"),
    ),
    "a norm": (
        "clip.norm_not_of_gradients",
        [plant(role="grad_norm", step=1, rank=0, value=scaled(1.001))],
        (1, Phase.CLIP, "grad_norm", "the gradients have"),
    ),
    "a gradient that is not clipped": (
        "clip.wrong_factor",
        [plant(role="main_grad", phase="clip", step=1, rank=0, fqn=WEIGHT, value=scaled(1.001))],
        (1, Phase.CLIP, WEIGHT, "multiplied by"),
    ),
    "another beta2 than the kernel's": (
        "optimizer.state_not_recomputed",
        [plant(role="exp_avg_sq", step=1, rank=0, fqn=WEIGHT, value=scaled(1.00001))],
        (1, Phase.OPTIMIZER, WEIGHT, "times what rounding allows"),
    ),
    "a state that is lost": (
        "optimizer.step_counter",
        [plant(role="hyperparameter", slot="step", step=1, rank=0, recorded=constant(0))],
        (1, Phase.OPTIMIZER, EMBEDDING + ".weight", "set back to 0"),
    ),
    "a beta2 that was not forwarded": (
        "optimizer.not_as_configured",
        [plant(role="hyperparameter", slot="beta2", value=constant(0.999))],
        (0, Phase.OPTIMIZER, EMBEDDING + ".weight", "beta2 is 0.999, not 0.95 asked for by the arguments"),
    ),
    "an eps that the kernel has of its own": (
        "optimizer.update_not_recomputed",
        [plant(role="hyperparameter", slot="eps", fqn=WEIGHT, value=constant(1e-5), recorded=constant(1e-8))],
        (0, Phase.OPTIMIZER, WEIGHT, "eps was 1e-05, not 1e-08"),
    ),
    "a decay that the kernel leaves out": (
        "optimizer.update_not_recomputed",
        [
            plant(
                role="hyperparameter",
                slot="weight_decay",
                fqn=WEIGHT,
                value=constant(0),
                recorded=constant(0.1),
            )
        ],
        (0, Phase.OPTIMIZER, WEIGHT, "weight decay was not applied"),
    ),
}


SIMILAR = {
    "a dW that is doubled after its GEMM",
    "one element of a sum",
    "a state that is lost",
    "a decay that the kernel leaves out",
}


@pytest.mark.parametrize("name", some(FAULTS, FAULTS.keys() - SIMILAR))
def test_a_fault_is_named_where_it_is(tmp_path, name):
    id_, plants, where = FAULTS[name]
    examination = check(tmp_path / "run", *plants)
    finding = own(examination)[0]
    step, phase, fqn, text = where
    assert finding.id == id_, ids(examination)
    assert finding.where is not None
    assert (finding.where.step, finding.where.phase, finding.where.fqn) == (step, phase, fqn)
    assert text in " ".join((finding.title, *finding.evidence))
    assert outcomes(examination)[id_].failed


def test_decayed_biases(tmp_path):
    examination = check(tmp_path / "run", undecayed=frozenset())
    assert ids(examination) == ["optimizer.decay_of_norm_or_bias"]
    assert all(name in own(examination)[0].evidence[-1] for name in BIASES)


def test_a_parameter_that_stays(tmp_path):
    examination = check(tmp_path / "run", unwritten=frozenset({WEIGHT}))
    assert {"optimizer.parameters_unmoved", "optimizer.update_not_recomputed"} == set(ids(examination))
    assert "the parameter was not written" in " ".join(finding.title for finding in own(examination))


def test_a_parameter_that_moves_at_lr_0(tmp_path):
    moved = plant(role="param", phase="optimizer", step=1, fqn=WEIGHT, rank=0, value=nudged())
    examination = check(tmp_path / "run", moved, lr=0.0)
    assert "optimizer.moved_without_update" in ids(examination)


TWICE = plant(role="main_grad", slot="after", step=1, microbatch=0, rank=0, fqn=WEIGHT, value=scaled(2))
WITHOUT_ELEMENTS = {
    "accumulate.not_the_sum": TWICE,
    "reduce.not_the_sum": plant(role="reduced_grad", step=1, rank=0, fqn=WEIGHT, value=scaled(2)),
}


@pytest.mark.parametrize("level", [Level.SKETCH, Level.STATISTICS])
@pytest.mark.parametrize("id_", WITHOUT_ELEMENTS)
def test_sketches_and_means_see_large_faults_and_say_what_decided(tmp_path, id_, level):
    examination = check(tmp_path / "run", WITHOUT_ELEMENTS[id_], level=level, payloads="")
    assert ids(examination) == [id_]
    way = "sketches" if level is Level.SKETCH else "mean"
    assert way in outcomes(examination)[id_].skipped


def test_without_elements_what_is_needed_is_said(tmp_path):
    found = outcomes(check(tmp_path / "run", payloads=""))
    assert found["wgrad.not_the_product"].exercised == 0
    assert "capture.verify_products" in found["wgrad.not_the_product"].skipped
    assert "needs elements" in found["optimizer.update_not_recomputed"].skipped
    assert HEAD not in found["optimizer.update_not_recomputed"].skipped


def test_a_counter_is_not_judged_by_steps_that_were_not_recorded(tmp_path):
    def later(extra):
        unseen = plant(step=0, drop=True)
        counts = [plant(role="hyperparameter", slot="step", step=1, value=constant(count)) for count in extra]
        return check(tmp_path / str(len(extra)), unseen, *counts, steps=3)

    assert "optimizer.step_counter" not in ids(later([]))
    assert "optimizer.step_counter" in ids(later([7]))  # step 2 then goes back to 2
