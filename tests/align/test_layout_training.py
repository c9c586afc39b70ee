"""Real trainings in different layouts, from one start: healthy pairs agree, faults are found in place."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import INIT_STEP, Diagnosis, Phase, RecordKey, Role, Verdict
from mindspeed_precision.report.console import render

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

MODEL = {"hidden": 64, "kv_groups": 2}
GATED = {**MODEL, "swiglu": True, "rmsnorm": True, "untie": True}
TARGET = "decoder.layers.1.mlp.linear_fc1.weight"
PROJECTION = "decoder.layers.0.self_attention.linear_proj.weight"
NORM = "decoder.layers.1.input_layernorm.weight"


def compared(diagnosis: Diagnosis) -> set[tuple[Phase, Role]]:
    return {(c.key.phase, c.key.role) for c in diagnosis.comparisons}


EVERY_KIND = {
    (Phase.INIT, Role.PARAM),
    (Phase.WGRAD, Role.WGRAD),
    (Phase.ACCUMULATE, Role.MAIN_GRAD),
    (Phase.REDUCE, Role.REDUCED_GRAD),
    (Phase.CLIP, Role.MAIN_GRAD),
    (Phase.OPTIMIZER, Role.EXP_AVG),
    (Phase.OPTIMIZER, Role.EXP_AVG_SQ),
    (Phase.OPTIMIZER, Role.PARAM),
}
AFTER_REDUCTION = {kind for kind in EVERY_KIND if kind[0] not in (Phase.WGRAD, Phase.ACCUMULATE)}


def _is(key: RecordKey, kind: tuple[Phase, Role]) -> bool:
    """Tell whether a key is of a kind; what arrives at a bias is a bgrad."""
    return key.phase is kind[0] and {Role.BGRAD: Role.WGRAD}.get(key.role, key.role) is kind[1]


def require_healthy(diagnosis: Diagnosis, kinds: set[tuple[Phase, Role]]) -> None:
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()
    assert not diagnosis.unmatched
    assert "cross_layout" in diagnosis.policy
    assert kinds <= compared(diagnosis)
    declared = [p for rank in load_run(diagnosis.baseline).ranks.values() for p in rank.parameters]
    parameters = {p.fqn for p in declared if not (p.placement and p.placement.copy_of)}
    for kind in kinds:  # of every parameter, not of some
        named = {c.key.fqn for c in diagnosis.comparisons if _is(c.key, kind)}
        assert named >= parameters, kind
    initial = [c for c in diagnosis.comparisons if c.key.step == INIT_STEP]
    assert {c.verdict for c in initial} == {Verdict.IDENTICAL}
    assert len(initial) == len(parameters)


def require_activations(diagnosis: Diagnosis, baseline: Path, *, transposed: bool = False) -> None:
    """Every record of a module of the baseline is compared, but for what no layout has a rule for.

    ``transposed``: what a vocabulary-parallel embedding returns under sequence parallelism is another matrix.
    """
    compared = {c.key for c in diagnosis.comparisons}
    phases = (Phase.FPROP, Phase.DGRAD, Phase.WGRAD)
    own = {r.key for r in load_run(baseline).ranks[0].records if r.key.phase in phases}
    left = {(key.fqn, key.role) for key in own - compared if key.slot != "all_reduce"}
    scattered = {("embedding.word_embeddings", role) for role in (Role.OUTPUT, Role.GRAD_OUTPUT)}
    assert left == (scattered if transposed else set())


def test_tensor_parallel_with_every_record_of_modules_and_collectives(record):
    baseline = record(1, more=("capture.level=tensor",), **MODEL)
    diagnosis = compare_runs(
        baseline, record(2, more=("capture.level=tensor",), start=baseline, tp=2, **MODEL)
    )
    require_healthy(diagnosis, EVERY_KIND)
    require_activations(diagnosis, baseline)
    notes = "\n".join(diagnosis.notes)
    assert "the baseline ran as TP1 PP1 DP1, the candidate as TP2 PP1 DP1" in notes
    assert "records incomparable: no layout rule for what a collective is given and gives back" in notes
    assert "records incomparable: no layout rule for main_grad in reduce" in notes  # collectives


def test_sequence_parallel_with_a_gated_mlp(record):
    baseline = record(1, **GATED)
    candidate = record(2, start=baseline, tp=2, sequence_parallel=True, **GATED)
    diagnosis = compare_runs(baseline, candidate)
    require_healthy(diagnosis, EVERY_KIND)
    assert not any("a sum over" in note for note in diagnosis.notes)
    gate = next(p for p in load_run(candidate).ranks[1].parameters if p.fqn == TARGET)
    (split,) = gate.placement.splits
    assert split.blocks == ((128, 128), (384, 128))  # of 512 rows: the gate, then the other half


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.12.1", "0.16.1", "0.18.2", "0.19.2"])
def test_versions_of_the_core(version, record):
    """Before 0.16 the attribute of a gated MLP does not say that its shards interleave."""
    baseline = record(1, version=version, **GATED)
    candidate = record(2, version=version, start=baseline, tp=2, sequence_parallel=True, **GATED)
    require_healthy(compare_runs(baseline, candidate), EVERY_KIND)


@pytest.mark.long
def test_statistics_alone_merge_too(record):
    more = ("capture.modules=false", "capture.collectives=false")
    kept = "capture.rules=[{role: param, phase: init, level: tensor}]"
    baseline = record(1, more=(*more, kept), **MODEL)
    diagnosis = compare_runs(baseline, record(2, more=more, start=baseline, tp=2, **MODEL))
    require_healthy(diagnosis, EVERY_KIND)
    assert any("judged by norm, minimum and maximum alone" in note for note in diagnosis.notes)


@pytest.mark.long
def test_a_transposed_shard_is_found_at_its_weight(record):
    baseline = record(1, **MODEL)
    diagnosis = compare_runs(baseline, record(2, start=baseline, plant="transposed_shard", tp=2, **MODEL))
    first = diagnosis.first_divergence
    assert (first.key.fqn, first.key.role, first.key.step) == (PROJECTION, Role.WGRAD, 0)
    assert first.held_by == (0, 1)
    assert "ranks 0, 1" in render(diagnosis)


def test_a_gradient_off_by_three_in_ten_thousand_is_found(record):
    baseline = record(1, **MODEL)
    diagnosis = compare_runs(baseline, record(2, start=baseline, plant="scaled_gradient", tp=2, **MODEL))
    first = diagnosis.first_divergence
    assert (first.key.fqn, first.key.role, first.key.step) == (TARGET, Role.REDUCED_GRAD, 0)
    assert len([o for o in diagnosis.origins if o.key.step == 0]) == 1


@pytest.mark.long
def test_bfloat16_and_the_same_fault_in_it(record):
    baseline = record(1, dtype="bf16", **MODEL)
    healthy = compare_runs(baseline, record(2, start=baseline, dtype="bf16", tp=2, **MODEL))
    require_healthy(healthy, {*EVERY_KIND, (Phase.OPTIMIZER, Role.MASTER_PARAM)})
    candidate = record(2, start=baseline, plant="scaled_gradient", dtype="bf16", tp=2, **MODEL)
    diagnosis = compare_runs(baseline, candidate)
    first = diagnosis.first_divergence
    assert (first.key.fqn, first.key.role, first.key.step) == (TARGET, Role.REDUCED_GRAD, 0)
    assert first.comparison.metrics["gain_change"] == pytest.approx(3e-4, rel=1e-2)
    assert "1.000300" in first.comparison.reason


@pytest.mark.long
def test_bfloat16_and_that_fault_in_a_sum_over_tensor_parallel_ranks(record):
    """The gradient of a norm under sequence parallelism, whose norm before the sum no rank knows."""
    baseline = record(1, dtype="bf16", **GATED)
    split = {"dtype": "bf16", "tp": 2, "sequence_parallel": True, **GATED}
    require_healthy(compare_runs(baseline, record(2, start=baseline, **split)), EVERY_KIND)
    diagnosis = compare_runs(baseline, record(2, start=baseline, plant="scaled_norm", **split))
    first = diagnosis.first_divergence
    assert (first.key.fqn, first.key.role, first.key.step) == (NORM, Role.REDUCED_GRAD, 0)
    assert first.comparison.metrics["gain_change"] == pytest.approx(3e-4, rel=1e-2)


PERTURBED = (
    "capture.level=tensor",
    "capture.modules=false",
    "capture.collectives=false",
    "perturb.epsilon=auto",
)


@pytest.mark.long
def test_calibration_finds_what_the_policy_does_not(record):
    """Three in a million, in the backward pass of one layer; the healthy twin stays healthy."""
    baseline = record(1, **MODEL)
    noisy = record(1, more=PERTURBED, start=baseline, **MODEL)
    healthy = compare_runs(baseline, record(2, start=baseline, tp=2, **MODEL), calibrate=[noisy])
    require_healthy(healthy, EVERY_KIND)
    assert sum("calibrated" in c.reason for c in healthy.comparisons) > 100
    candidate = record(2, start=baseline, plant="scaled_dgrad", tp=2, **MODEL)
    assert compare_runs(baseline, candidate).status is Verdict.WITHIN_TOLERANCE
    diagnosis = compare_runs(baseline, candidate, calibrate=[noisy])
    first = diagnosis.first_divergence
    assert first.key.step == 0
    assert first.key.fqn.startswith("decoder.layers.1.mlp")
    assert "calibrated" in first.comparison.reason


@pytest.mark.long
def test_noise_does_not_depend_on_the_layout(record):
    """All of it is there: bits of the initial parameters agree between layouts, and differ without noise."""
    baseline = record(1, **MODEL)
    noisy = record(1, more=PERTURBED, start=baseline, **MODEL)
    both = compare_runs(noisy, record(2, more=PERTURBED, start=baseline, tp=2, **MODEL))
    initial = [c for c in both.comparisons if c.key.step == INIT_STEP]
    assert {c.verdict for c in initial} == {Verdict.IDENTICAL}
    alone = compare_runs(baseline, noisy)
    moved = [c for c in alone.comparisons if c.key.step == INIT_STEP and c.verdict is not Verdict.IDENTICAL]
    assert {c.key.fqn for c in moved} >= {p.fqn for p in load_run(baseline).ranks[0].parameters} - {
        c.key.fqn for c in initial if c.pair.baseline.digest.statistics.l2_norm == 0
    }
    assert max(c.metrics["max_ulp"] for c in moved) == 1
    assert alone.findings[0].id == "config.perturbed"


def test_a_norm_without_its_reduction_is_found(record):
    baseline = record(1, **GATED)
    candidate = record(2, start=baseline, plant="unreduced_norm", tp=2, sequence_parallel=True, **GATED)
    diagnosis = compare_runs(baseline, candidate)
    assert diagnosis.first_divergence.key.fqn == NORM
    (finding,) = [f for f in diagnosis.findings if f.id == "parallel.replicas_differ"]
    assert finding.where.fqn == NORM
    assert "ranks 0 and ranks 1 hold different bits" in finding.evidence[1]


FORWARD = {
    "scaled_output": ("decoder.layers.0.mlp.linear_fc1", False),
    "unreduced_output": ("decoder.layers.0.self_attention.linear_proj", False),
    "rolled_rows": ("decoder.layers.1.mlp.linear_fc1", True),
}
"""Faults in the forward of one tensor-parallel rank: their module, and whether sequence parallelism is on."""


@pytest.mark.parametrize(
    "plant",
    [name if name == "unreduced_output" else pytest.param(name, marks=pytest.mark.long) for name in FORWARD],
)
def test_a_fault_in_the_forward_of_one_rank_is_found_at_its_module(plant, record):
    """Its healthy twins: ``test_tensor_parallel_…`` and ``test_sequence_parallel_of_every_module``."""
    module, shared = FORWARD[plant]
    baseline = record(1, more=WHOLE, **MODEL)
    candidate = record(2, more=WHOLE, start=baseline, plant=plant, tp=2, sequence_parallel=shared, **MODEL)
    diagnosis = compare_runs(baseline, candidate)
    origins = [o for o in diagnosis.origins if o.key.step == 0]
    assert {(o.key.phase, o.key.fqn, o.key.role) for o in origins} == {(Phase.FPROP, module, Role.OUTPUT)}
    assert {o.key.microbatch for o in origins} == {0, 1}
    assert all(o.propagated > 100 for o in origins)
    diverged = {c.key.phase for c in diagnosis.comparisons if c.verdict is Verdict.DIVERGED}
    assert {Phase.DGRAD, Phase.WGRAD, Phase.REDUCE} <= diverged  # propagated, all of them
    (cause,) = [f for f in diagnosis.findings if f.id == "fprop.value"]
    assert cause.where.fqn == module
    copies = [f for f in diagnosis.findings if f.id == "parallel.replicas_differ"]
    assert [f.where.fqn for f in copies] == ([module] if plant == "unreduced_output" else [])


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.12.1", "0.16.1", "0.17.1", "0.18.2", "0.19.2"])
def test_sequence_parallel_of_every_module(version, record):
    for settings in (MODEL, GATED):
        baseline = record(1, version=version, more=WHOLE, **settings)
        candidate = record(
            2, version=version, more=WHOLE, start=baseline, tp=2, sequence_parallel=True, **settings
        )
        diagnosis = compare_runs(baseline, candidate)
        require_healthy(diagnosis, EVERY_KIND)
        require_activations(diagnosis, baseline, transposed=True)


@pytest.mark.long
def test_sketches_alone_judge_sums_over_ranks(record):
    more = ("capture.level=sketch",)
    start = record(1, more=WHOLE, **GATED)
    baseline = record(1, more=more, start=start, **GATED)
    healthy = record(2, more=more, start=start, tp=2, sequence_parallel=True, **GATED)
    diagnosis = compare_runs(baseline, healthy)
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE, render(diagnosis)
    assert diagnosis.findings == ()
    norm = "decoder.layers.1.input_layernorm.weight"
    assert norm in {c.key.fqn for c in diagnosis.comparisons if c.key.phase is Phase.WGRAD}


WHOLE = ("capture.level=tensor",)


def require_same_activations(diagnosis: Diagnosis) -> None:
    """Before any update has summed in another order, every module of a layer gives and gets the same bits."""
    first = [
        c for c in diagnosis.comparisons if c.key.step == 0 and c.key.phase in (Phase.FPROP, Phase.DGRAD)
    ]
    assert {(c.key.phase, c.key.role) for c in first} == {
        (Phase.FPROP, Role.INPUT),
        (Phase.FPROP, Role.OUTPUT),
        (Phase.DGRAD, Role.GRAD_INPUT),
        (Phase.DGRAD, Role.GRAD_OUTPUT),
    }
    names = {c.key.fqn for c in first}
    assert {
        "embedding.word_embeddings",
        "decoder.layers.0.mlp",
        "decoder.layers.1.mlp",
        "output_layer",
    } <= names
    spanning = {"", "decoder"}  # what enters the first part and leaves the last one
    assert names & spanning == spanning
    assert "collective" not in names
    assert {c.verdict for c in first} == {Verdict.IDENTICAL}
    passed_on = any("are what a pipeline stage gives to another" in note for note in diagnosis.notes)
    unruled = any("no layout rule for what has parts on several stages" in note for note in diagnosis.notes)
    assert (passed_on, unruled) == (True, True)  # its collectives, too, are of several stages


def test_pipeline_parallel_with_a_tied_embedding(record):
    baseline = record(1, more=WHOLE, **MODEL)
    diagnosis = compare_runs(baseline, record(2, more=WHOLE, start=baseline, pp=2, **MODEL))
    require_healthy(diagnosis, AFTER_REDUCTION)
    require_same_activations(diagnosis)
    wgrads = {c.key.fqn for c in diagnosis.comparisons if c.key.phase is Phase.WGRAD}
    tied = "embedding.word_embeddings.weight"  # a sum over two stages
    assert {PROJECTION, TARGET, "decoder.final_layernorm.weight", tied} <= wgrads


@pytest.mark.long
def test_interleaved_pipeline_stages(record):
    """Against one process and against stages that do not interleave, whichever run is the baseline."""
    deep = {**MODEL, "layers": 4, "microbatches": 4, "more": WHOLE}
    one = record(1, **deep)
    two = record(2, start=one, pp=2, **deep)
    interleaved = record(2, start=one, pp=2, vpp=2, **deep)
    for other in (one, two):
        diagnosis = compare_runs(other, interleaved)
        require_healthy(diagnosis, AFTER_REDUCTION)
        require_same_activations(diagnosis)
        gemm = [c for c in diagnosis.comparisons if c.key.phase is Phase.WGRAD and c.key.step == 0]
        assert {c.verdict for c in gemm} == {Verdict.IDENTICAL}
    faulty = record(2, start=one, plant="scaled_mlp", pp=2, vpp=2, **deep)
    for pair in ((one, faulty), (faulty, one), (two, faulty), (faulty, two), (interleaved, faulty)):
        diagnosis = compare_runs(*pair)
        first = diagnosis.first_divergence.key
        assert (first.fqn, first.role, first.step) == ("decoder.layers.1.mlp", Role.OUTPUT, 0)
        early = {o.key.fqn for o in diagnosis.origins if o.key.phase is Phase.FPROP and o.key.step == 0}
        assert early == {first.fqn}


@pytest.mark.long
def test_pipeline_stages_of_tensor_parallel_ranks(record):
    """Activations are compared rank by rank of the tensor-parallel group, parameters whole."""
    start = record(1, more=WHOLE, **GATED)
    baseline = record(2, more=WHOLE, start=start, tp=2, sequence_parallel=True, **GATED)
    candidate = record(4, more=WHOLE, start=start, tp=2, pp=2, sequence_parallel=True, **GATED)
    diagnosis = compare_runs(baseline, candidate)
    assert diagnosis.status in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE), render(diagnosis)
    assert diagnosis.findings == ()
    require_same_activations(diagnosis)
    assert {c.pair.rank for c in diagnosis.comparisons if c.key.phase is Phase.FPROP} == {0, 1}
    assert {c.pair.rank for c in diagnosis.comparisons if c.key.phase is Phase.REDUCE} == {0}


def test_a_scaled_pipeline_stage_is_found(record):
    baseline = record(1, more=WHOLE, **MODEL)
    candidate = record(2, more=WHOLE, start=baseline, plant="scaled_stage", pp=2, **MODEL)
    diagnosis = compare_runs(baseline, candidate)
    first = diagnosis.first_divergence
    assert (first.key.role, first.key.step, first.held_by) == (Role.REDUCED_GRAD, 0, (1,))
    wrong = {o.key.fqn for o in diagnosis.origins if o.key.role is Role.REDUCED_GRAD and o.key.step == 0}
    assert wrong
    assert all(name.startswith("decoder.layers.1.") for name in wrong)


@pytest.mark.parametrize(
    "distributed",
    [pytest.param(False, id="plain", marks=pytest.mark.long), pytest.param(True, id="distributed optimizer")],
)
def test_data_parallel(distributed, record):
    first = record(1, **MODEL)
    baseline = record(1, start=first, microbatches=4, **MODEL)
    candidate = record(2, start=first, microbatches=2, distributed_optimizer=distributed, **MODEL)
    diagnosis = compare_runs(baseline, candidate)
    require_healthy(diagnosis, {*AFTER_REDUCTION, (Phase.WGRAD, Role.WGRAD)})
    assert {c.key.microbatch for c in diagnosis.comparisons if c.key.phase is Phase.WGRAD} == {0, 1, 2, 3}
    assert Phase.ACCUMULATE not in {c.key.phase for c in diagnosis.comparisons}
    assert any("the batch is split otherwise" in note for note in diagnosis.notes)


@pytest.mark.parametrize(
    ("dtype", "plant", "factor"),
    [
        ("bf16", "scaled_gradient", 3e-4),
        pytest.param("fp32", "scaled_gradient", 3e-4, marks=pytest.mark.long),
        pytest.param("bf16", "barely_scaled_gradient", 2e-5, marks=pytest.mark.long),
        pytest.param("fp32", "barely_scaled_gradient", 2e-5, marks=pytest.mark.long),
    ],
)
def test_a_gradient_off_by_a_little_after_a_sum_over_ranks(dtype, plant, factor, record):
    """Sketches of what the ranks had add up to that of their sum: the factor shows, whatever the dtype."""
    first = record(1, dtype=dtype, **MODEL)
    baseline = record(1, start=first, microbatches=4, dtype=dtype, **MODEL)
    healthy = compare_runs(baseline, record(2, start=first, microbatches=2, dtype=dtype, **MODEL))
    require_healthy(healthy, AFTER_REDUCTION)
    candidate = record(2, start=first, plant=plant, microbatches=2, dtype=dtype, **MODEL)
    found = compare_runs(baseline, candidate).first_divergence
    assert (found.key.fqn, found.key.role, found.key.step) == (TARGET, Role.REDUCED_GRAD, 0)
    assert found.comparison.metrics["gain_change"] == pytest.approx(factor, rel=1e-2)


@pytest.mark.long
def test_four_ranks_of_both_kinds(record):
    baseline = record(1, layers=2, **GATED)
    candidate = record(4, start=baseline, tp=2, pp=2, sequence_parallel=True, layers=2, **GATED)
    require_healthy(compare_runs(baseline, candidate), AFTER_REDUCTION)
    first = record(2, start=baseline, layers=2, **GATED)
    last = record(4, start=baseline, layers=2, tp=2, distributed_optimizer=True, **GATED)
    require_healthy(compare_runs(first, last), EVERY_KIND)  # lanes: the batch is split alike


def log_of(error: ExternalCommandError) -> str:
    return Path(error.remedy.removeprefix("read ")).read_text(encoding="utf-8")


@pytest.mark.long
def test_a_start_needs_elements_of_the_same_model(record):
    thin = record(1, more=("capture.modules=false",), **MODEL)
    kept = record(1, **MODEL)
    with pytest.raises(ExternalCommandError) as caught:
        record(2, start=thin, tp=2, **MODEL)
    assert "did not keep the elements of" in log_of(caught.value)
    with pytest.raises(ExternalCommandError) as caught:
        record(1, start=kept, hidden=32)
    assert "is of another kind" in log_of(caught.value)
