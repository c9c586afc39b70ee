"""Two faults in one run, the first of which changes all behind it: both are origins, each with its share.

Real megatron-core, real runs. The twins have one of the faults, or none.
"""

from __future__ import annotations

import pytest

from mindspeed_precision.records import Phase, Role, Verdict
from mindspeed_precision.report.console import render
from mindspeed_precision.report.verdict_json import verdict

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

FORWARD = "decoder.layers.0.mlp"
WEIGHT = "decoder.layers.1.self_attention.linear_proj.weight"
GEMM = "decoder.layers.1.self_attention.linear_proj"
OPERANDS = ("capture.rules=[{phase: wgrad, level: tensor}]",)


def module_of(trainer, name):
    return trainer.model[0].module.get_submodule(name)


def another_forward(trainer):
    """The MLP of the first layer gives 1.001 times what it should."""
    module_of(trainer, FORWARD).register_forward_hook(lambda module, args, out: (out[0] * 1.001, *out[1:]))


def rows_on_the_way(trainer):
    """Eight rows of dW are 1.5 times too large when they reach the parameter."""
    import torch

    weight = module_of(trainer, GEMM).weight
    weight.register_hook(lambda grad: torch.cat([grad[:8] * 1.5, grad[8:]]))


def rows_in_the_product(trainer):
    """The GEMM that makes dW of the same weight gives the same eight rows."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Spoilt(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.matmul and result.shape == (32, 32):
                self.calls += 1
                if self.calls % 2:  # backward: the last layer comes first
                    result[:8] *= 1.5
            return result

    mode, zero_grad, finalize = (
        Spoilt(),
        trainer.optimizer.zero_grad,
        trainer.config.finalize_model_grads_func,
    )

    def begin(*args, **kwargs):
        zero_grad(*args, **kwargs)
        mode.__enter__()

    def end(*args, **kwargs):
        mode.__exit__(None, None, None)
        return finalize(*args, **kwargs)

    trainer.optimizer.zero_grad, trainer.config.finalize_model_grads_func = begin, end


def scaled_reduction(trainer):
    """The reduction multiplies the gradient of one weight by 1.0003."""
    finalize, weight = trainer.config.finalize_model_grads_func, module_of(trainer, GEMM).weight

    def scaled(*args, **kwargs):
        result = finalize(*args, **kwargs)
        weight.main_grad.mul_(1.0003)
        return result

    trainer.config.finalize_model_grads_func = scaled


@pytest.fixture(scope="module")
def compare(cpu_megatron, tmp_path_factory):
    """Return a function that records a run with some faults and compares it with one that has none."""
    from mindspeed_precision import compare_runs
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    folder = tmp_path_factory.mktemp("two_faults")

    def record(name, plants, overrides):
        def plant(trainer):
            for one in plants:
                one(trainer)

        out = folder / f"{name}{len(list(folder.iterdir()))}"
        record_training(TrainerSettings(), out, plant=plant, overrides=overrides)
        return out

    baselines = {}

    def run(*plants, overrides=()):
        if overrides not in baselines:
            baselines[overrides] = record("baseline", (), overrides)
        return compare_runs(baselines[overrides], record("candidate", plants, overrides), replay=False)

    return run


def places(diagnosis):
    return {(o.key.phase, o.key.role, o.key.fqn) for o in diagnosis.origins}


THE_FORWARD = (Phase.FPROP, Role.OUTPUT, FORWARD)
THE_DW = (Phase.WGRAD, Role.WGRAD, WEIGHT)
THE_PRODUCT = (Phase.WGRAD, Role.WGRAD, GEMM)
THE_REDUCED = (Phase.REDUCE, Role.REDUCED_GRAD, WEIGHT)


@pytest.mark.parametrize(
    ("fault", "where", "overrides", "finding"),
    [
        pytest.param(rows_on_the_way, THE_DW, (), "wgrad.own_fault", id="after the GEMM"),
        pytest.param(rows_in_the_product, THE_PRODUCT, OPERANDS, "wgrad.own_fault", id="in the GEMM"),
        pytest.param(scaled_reduction, THE_REDUCED, (), "reduce.own_fault", id="in the reduction"),
    ],
)
def test_a_forward_does_not_hide_a_gradient_of_another_layer(compare, fault, where, overrides, finding):
    diagnosis = compare(another_forward, fault, overrides=overrides)
    assert places(diagnosis) == {THE_FORWARD, where}
    first, second = diagnosis.origins[0], next(o for o in diagnosis.origins if o.own)
    assert (first.key.step, first.key.fqn, first.own) == (0, FORWARD, "")
    assert (second.key.step, second.key.fqn) == (0, where[2])
    assert second.own
    assert second.inputs.endswith("differs, too, by another cause") or "differ, too" in second.inputs
    assert first.propagated > 500
    # clipping mixes all gradients, so that what follows a reduction is explained by the first fault
    assert second.propagated > 0 or where is THE_REDUCED
    found = {f.id: f for f in diagnosis.findings}
    assert found.keys() == {"fprop.value", finding}
    assert second.own in found[finding].evidence
    assert {key.fqn for key in found[finding].explains} == {where[2]}
    text = " ".join(render(diagnosis).split())
    share = sum(origin.propagated for origin in diagnosis.origins if origin.own)
    assert f"at step 0: explains {share} more record" in text
    told = {(o["fqn"], o["propagated"], o["own_fault"]) for o in verdict(diagnosis)["origins"]}
    assert {(FORWARD, first.propagated, ""), (where[2], second.propagated, second.own)} <= told


@pytest.mark.parametrize("overrides", [(), OPERANDS], ids=["statistics", "operands"])
def test_a_forward_alone_is_alone(compare, overrides):
    diagnosis = compare(another_forward, overrides=overrides)
    assert places(diagnosis) == {THE_FORWARD}
    assert [f.id for f in diagnosis.findings] == ["fprop.value"]
    untold = [note for note in diagnosis.notes if "a fault of its own" in note]
    assert bool(untold) == (overrides == ())


def test_a_gradient_alone_is_what_it_was(compare):
    """Where its inputs agree, rules that know more speak."""
    assert places(compare(rows_on_the_way)) == {THE_DW}
    diagnosis = compare(rows_in_the_product, overrides=OPERANDS)
    assert places(diagnosis) == {THE_PRODUCT}
    assert [f.id for f in diagnosis.findings] == ["wgrad.value"]


def test_none_is_none(compare):
    assert compare(overrides=OPERANDS).status is Verdict.IDENTICAL
