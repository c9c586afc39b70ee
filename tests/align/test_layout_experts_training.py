"""Real trainings with experts and with context parallelism, from one start: healthy pairs agree."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import NO_MICROBATCH, Phase, Role, Verdict
from mindspeed_precision.report.console import render

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

MODEL = {"hidden": 64, "kv_groups": 2}
GATED = {**MODEL, "swiglu": True, "rmsnorm": True, "untie": True}
MIXTURE = {**GATED, "experts": 4}
EXPERT = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
ELSEWHERE = "an expert's tokens come from other ranks"
CONTEXT = "not summed yet over the context-parallel group"
REDUCED = {
    (Phase.INIT, Role.PARAM),
    (Phase.REDUCE, Role.REDUCED_GRAD),
    (Phase.CLIP, Role.MAIN_GRAD),
    (Phase.OPTIMIZER, Role.EXP_AVG),
    (Phase.OPTIMIZER, Role.EXP_AVG_SQ),
    (Phase.OPTIMIZER, Role.PARAM),
}


def names(diagnosis, kind):
    return {c.key.fqn for c in diagnosis.comparisons if (c.key.phase, c.key.role) == kind}


def require_healthy(diagnosis):
    """Every parameter is compared by its name, from its start to its update, and nothing is found."""
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()
    assert not diagnosis.unmatched
    assert diagnosis.coverage.parameters_with_wgrad == diagnosis.coverage.parameters
    for kind in REDUCED:
        assert len(names(diagnosis, kind)) == diagnosis.coverage.parameters, kind


def noted(diagnosis, reason):
    return any(f"records incomparable: {reason}" in note for note in diagnosis.notes)


def test_expert_parallelism(record):
    """With a distributed optimizer, which is then one for experts and one for all else."""
    baseline = record(1, microbatches=4, **MIXTURE)
    candidate = record(2, start=baseline, ep=2, distributed_optimizer=True, **MIXTURE)
    diagnosis = compare_runs(baseline, candidate)
    require_healthy(diagnosis)
    assert "DP2 EP2, distributed optimizer" in diagnosis.policy


@pytest.mark.long
def test_context_parallelism(record):
    baseline = record(1, microbatches=4, **MIXTURE)
    diagnosis = compare_runs(baseline, record(2, start=baseline, cp=2, microbatches=4, **MIXTURE))
    require_healthy(diagnosis)
    wgrads = names(diagnosis, (Phase.WGRAD, Role.WGRAD))
    assert {"decoder.layers.0.mlp.router.weight", "output_layer.weight", EXPERT} <= wgrads
    assert noted(diagnosis, CONTEXT)  # the losses
    batches = [c for c in diagnosis.comparisons if c.key.role is Role.BATCH]
    assert batches
    assert {c.verdict for c in batches} == {Verdict.IDENTICAL}


WHOLE = ("capture.level=tensor", "capture.collectives=false")


def shown(diagnosis, phases=(Phase.FPROP, Phase.DGRAD, Phase.WGRAD)):
    """Return what modules received and returned, and the products that are dW, as far as it was compared."""
    return {(c.key.phase, c.key.fqn, c.key.role) for c in diagnosis.comparisons if c.key.phase in phases}


def test_context_parallelism_of_every_module(record):
    """The chunks of a sequence are put together, gradients of its parts summed. Then a fault in one rank."""
    baseline = record(1, more=WHOLE, **MODEL)
    diagnosis = compare_runs(baseline, record(2, more=WHOLE, start=baseline, cp=2, **MODEL))
    require_healthy(diagnosis)
    found = shown(diagnosis)
    for layer in (0, 1):
        name = f"decoder.layers.{layer}"
        for module in (
            "mlp",
            "mlp.linear_fc1",
            "self_attention",
            "self_attention.linear_qkv",
            "input_layernorm",
        ):
            assert (Phase.FPROP, f"{name}.{module}", Role.OUTPUT) in found
            assert (Phase.DGRAD, f"{name}.{module}", Role.GRAD_OUTPUT) in found
        assert (Phase.FPROP, f"{name}.self_attention.core_attention", Role.OUTPUT) in found
        assert (Phase.WGRAD, f"{name}.mlp.linear_fc1", Role.WGRAD) in found
    assert (Phase.WGRAD, "output_layer", Role.WGRAD) in found
    assert any("keys come in an order of their own" in note for note in diagnosis.notes)
    faulty = record(2, more=WHOLE, start=baseline, plant="scaled_output_of_context", cp=2, **MODEL)
    origins = [o for o in compare_runs(baseline, faulty).origins if o.key.step == 0]
    assert {(o.key.phase, o.key.fqn, o.key.role) for o in origins} == {
        (Phase.FPROP, "decoder.layers.0.mlp.linear_fc1", Role.OUTPUT)
    }


@pytest.mark.long
def test_context_parallelism_with_others(record):
    """Equal parts of a sequence under another tensor-parallel size; and each against one process."""
    start = record(1, microbatches=4, more=WHOLE, **GATED)
    context = record(2, start=start, cp=2, microbatches=4, more=WHOLE, **GATED)
    split = {"cp": 2, "tp": 2, "sequence_parallel": True}
    both = record(4, start=start, microbatches=4, more=WHOLE, **split, **GATED)
    batch = record(4, start=start, cp=2, microbatches=2, more=WHOLE, **GATED)
    for pair in ((context, both), (start, both), (start, batch), (context, batch)):
        diagnosis = compare_runs(*pair)
        require_healthy(diagnosis)
        found = shown(diagnosis)
        assert (Phase.FPROP, "decoder.layers.1.mlp", Role.OUTPUT) in found, diagnosis.notes
        assert (Phase.DGRAD, "decoder.layers.1.mlp", Role.GRAD_INPUT) in found
        assert (Phase.WGRAD, "decoder.layers.1.mlp.linear_fc1.weight", Role.WGRAD) in found


def test_modules_of_experts_that_take_from_their_own_rank(record):
    """Data parallelism alone gives an expert the tokens of a microbatch in the order that one rank has."""
    more = ("capture.level=statistics", "capture.collectives=false")
    start = record(1, microbatches=4, **MIXTURE)
    one = record(1, start=start, microbatches=4, more=more, **MIXTURE)
    diagnosis = compare_runs(one, record(2, start=start, microbatches=2, more=more, **MIXTURE))
    require_healthy(diagnosis)
    expert = EXPERT.removesuffix(".weight")
    assert {(Phase.FPROP, expert, Role.OUTPUT), (Phase.DGRAD, expert, Role.GRAD_OUTPUT)} <= shown(diagnosis)
    first = {c.verdict for c in diagnosis.comparisons if c.key.phase is Phase.FPROP and c.key.step == 0}
    assert first == {Verdict.IDENTICAL}


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.12.1", "0.17.1", "0.19.2"])
def test_modules_of_experts_within_a_tensor_parallel_group(version, record):
    """The tokens of one group reach an expert in one order, whole experts or halves of them; then a fault."""
    settings = {"version": version, "more": WHOLE, **MIXTURE}
    baseline = record(1, **settings)
    expert = EXPERT.removesuffix(".weight")
    for split in ({"ep": 2, "etp": 1}, {"etp": 2}):
        layout = {"tp": 2, "sequence_parallel": True, **split}
        diagnosis = compare_runs(baseline, record(2, start=baseline, **layout, **settings))
        require_healthy(diagnosis)
        found = shown(diagnosis)
        modules = {key for key in found if key[1] in (expert, expert.removesuffix(".linear_fc1"))}
        phases = {(phase, role) for phase, _, role in modules}
        assert phases >= {
            (Phase.FPROP, Role.OUTPUT),
            (Phase.DGRAD, Role.GRAD_INPUT),
            (Phase.WGRAD, Role.INPUT),
        }
        assert (Phase.FPROP, "decoder.layers.0.mlp.router", Role.OUTPUT) in found
    faulty = record(2, start=baseline, plant="scaled_expert", **layout, **settings)
    first = compare_runs(baseline, faulty).first_divergence.key
    assert (first.step, first.phase, first.role) == (0, Phase.FPROP, Role.OUTPUT)
    assert first.fqn == "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1"


@pytest.mark.long
def test_experts_of_equal_data_parallel_ranks(record):
    start = record(1, microbatches=4, **MIXTURE)
    diagnosis = compare_runs(record(2, start=start, **MIXTURE), record(2, start=start, ep=2, **MIXTURE))
    require_healthy(diagnosis)
    early = names(diagnosis, (Phase.WGRAD, Role.WGRAD))
    assert {"decoder.layers.0.mlp.router.weight", "output_layer.weight"} <= early
    assert noted(diagnosis, ELSEWHERE)  # of a microbatch; compared over a step
    keys = [c.key for c in diagnosis.comparisons if c.key.phase is Phase.WGRAD and ".experts." in c.key.fqn]
    assert {key.microbatch for key in keys} == {NO_MICROBATCH}
    assert len({key.fqn for key in keys if key.fqn.endswith(".weight")}) == 16


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.12.1", "0.16.1", "0.18.2", "0.19.2"])
def test_versions_of_the_core(version, record):
    start = record(1, version=version, microbatches=4, **MIXTURE)
    experts = record(2, version=version, start=start, ep=2, distributed_optimizer=True, **MIXTURE)
    require_healthy(compare_runs(start, experts))
    context = record(2, version=version, start=start, cp=2, microbatches=4, **MIXTURE)
    diagnosis = compare_runs(start, context)
    if version == "0.12.1":  # a bug of its own: the aux loss is not scaled by the context-parallel size
        first = diagnosis.first_divergence.key
        assert (first.step, first.phase, first.role) == (0, Phase.WGRAD, Role.WGRAD)
        assert first.fqn == "decoder.layers.1.mlp.router.weight"
        return
    require_healthy(diagnosis)


@pytest.mark.long
def test_experts_that_tensor_parallel_ranks_have_for_themselves(record):
    """EP2 within the tensor-parallel group: of each expert dW is over the same tokens. And without EP."""
    baseline = record(1, **MIXTURE)
    split = {"tp": 2, "sequence_parallel": True, "etp": 1, **MIXTURE}
    diagnosis = compare_runs(baseline, record(2, start=baseline, ep=2, **split))
    require_healthy(diagnosis)
    assert any(".experts." in name for name in names(diagnosis, (Phase.WGRAD, Role.WGRAD)))
    # megatron-core reduces an expert's gradient over the data-parallel ranks alone where EP is 1
    diagnosis = compare_runs(baseline, record(2, start=baseline, **split))
    first = diagnosis.first_divergence.key
    assert (first.fqn, first.role) == (EXPERT, Role.REDUCED_GRAD)
    (finding,) = [f for f in diagnosis.findings if f.id == "parallel.replicas_differ"]
    assert ".experts." in finding.where.fqn
