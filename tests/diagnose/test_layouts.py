"""Kernels that ignore strides: accumulation and split, each with a healthy twin, proved in numpy alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.config import load_settings
from mindspeed_precision.diagnose.storage import read_ignoring_layout
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    Layout,
    Level,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    Severity,
    TensorRecord,
    Verdict,
)
from mindspeed_precision.report.console import render
from mindspeed_precision.report.files import write_files
from mindspeed_precision.testing.fake_runs import (
    EMBEDDING,
    HEAD,
    LINEAR,
    constant,
    nudged,
    plant,
    write_fake_run,
)

WEIGHT = f"{LINEAR}.weight"
ALL = frozenset({f"{HEAD}.weight", WEIGHT})
ELEMENTS = {"level": Level.TENSOR, "microbatches": 3, "dot_grad": True}
WRONG = {"transposed": ALL, "strides_ignored": True}


def both(directory, shape, **candidate):
    one = write_fake_run(directory / "baseline", **shape)
    return compare_runs(one, write_fake_run(directory / "candidate", **{**shape, **candidate}))


def recipes(finding):
    """Map each recipe to the sides that it gives bit for bit."""
    return {
        recipe.recipe: [
            side
            for side, count in (
                ("baseline", recipe.baseline_mismatched),
                ("candidate", recipe.candidate_mismatched),
            )
            if count == 0
        ]
        for recipe in finding.replay.recipes
    }


def test_accumulation_that_ignores_strides_is_proved(tmp_path):
    diagnosis = both(tmp_path, ELEMENTS, **WRONG)
    first = diagnosis.first_divergence
    assert (first.key.step, first.key.microbatch, first.key.phase) == (0, 1, Phase.ACCUMULATE)
    assert {origin.key.fqn for origin in diagnosis.origins} == ALL
    (finding,) = diagnosis.findings
    assert (finding.id, finding.severity) == ("layout.noncontiguous_accumulate", Severity.ERROR)
    assert finding.proved_by_replay
    assert set(finding.explains) == {origin.key for origin in diagnosis.origins}
    shape = (11, 8) if first.key.fqn.startswith(HEAD) else (8, 8)
    strides = [1, shape[0]]
    assert recipes(finding) == {
        "main_grad + dW": ["baseline"],
        f"main_grad + dW, strides ignored of main_grad {strides} and dW {strides}": ["candidate"],
        f"main_grad + dW, strides ignored of main_grad {strides}": [],
        f"main_grad + dW, strides ignored of dW {strides}": [],
    }
    assert finding.replay.baseline_error < 1e-6 < 0.1 < finding.replay.candidate_error
    assert f"dW: strides ({strides[0]}, {strides[1]}) (not contiguous) in the candidate" in finding.evidence
    assert finding.remedy.startswith("candidate: --precision-debug-set remedies=[wgrad_contiguous]")
    text = " ".join(render(diagnosis).split())
    assert "the candidate is wrong" in text
    assert "gives the candidate's main_grad bit for bit" in text


def test_the_baseline_may_be_the_wrong_side(tmp_path):
    diagnosis = both(tmp_path, {**ELEMENTS, **WRONG}, transposed=frozenset(), strides_ignored=False)
    (finding,) = diagnosis.findings
    assert finding.id == "layout.noncontiguous_accumulate"
    assert finding.proved_by_replay
    assert "the baseline is wrong" in render(diagnosis)


def test_a_side_that_adds_transposed_gradients_rightly_is_not_blamed(tmp_path):
    diagnosis = both(tmp_path, {**ELEMENTS, "transposed": ALL}, strides_ignored=True)
    (finding,) = diagnosis.findings
    assert finding.proved_by_replay
    assert recipes(finding)["main_grad + dW"] == ["baseline"]
    assert "the candidate is wrong" in render(diagnosis)


@pytest.mark.parametrize("dot_grad", [True, False])
def test_transposed_gradients_that_are_added_rightly_are_no_finding(dot_grad, tmp_path):
    diagnosis = both(tmp_path, {**ELEMENTS, "dot_grad": dot_grad}, transposed=ALL)
    assert (diagnosis.status, diagnosis.findings) == (Verdict.IDENTICAL, ())


def test_ignored_strides_of_contiguous_gradients_are_no_finding(tmp_path):
    diagnosis = both(tmp_path, ELEMENTS, strides_ignored=True)
    assert (diagnosis.status, diagnosis.findings) == (Verdict.IDENTICAL, ())


def test_a_buffer_misreads_the_first_microbatch_already(tmp_path):
    diagnosis = both(tmp_path, {**ELEMENTS, "dot_grad": False}, **WRONG)
    assert diagnosis.first_divergence.key.microbatch == 0
    (finding,) = diagnosis.findings
    assert finding.proved_by_replay


def test_another_sum_of_transposed_gradients_is_not_blamed_on_the_layout(tmp_path):
    fault = plant(phase="accumulate", slot="after", fqn=WEIGHT, step=0, microbatch=1, value=nudged())
    diagnosis = both(tmp_path, ELEMENTS, transposed=ALL, plants=[fault])
    (finding,) = diagnosis.findings
    assert finding.id == "wgrad.accumulation"
    assert not finding.proved_by_replay
    assert recipes(finding)["main_grad + dW"] == ["baseline"]


def test_without_elements_the_window_asks_for_what_the_proof_needs(tmp_path):
    shape = {**ELEMENTS, "level": Level.STATISTICS}
    diagnosis = both(tmp_path, shape, **WRONG)
    (finding,) = diagnosis.findings
    assert finding.id == "layout.noncontiguous_accumulate"
    assert not finding.proved_by_replay
    assert "not proved by replay: the elements of main_grad and dW were not kept" in finding.evidence
    assert "refine.yaml" in finding.remedy
    capture = load_settings(write_files(diagnosis, tmp_path / "out")["refine"]).capture

    def level(**key):
        return capture.level_of(RecordKey(step=0, microbatch=1, **key))

    for name in ALL:
        assert level(phase=Phase.WGRAD, fqn=name, role=Role.WGRAD) is Level.TENSOR
        for slot in ("before", "after"):
            key = {"phase": Phase.ACCUMULATE, "fqn": name, "role": Role.MAIN_GRAD, "slot": slot}
            assert level(**key) is Level.TENSOR
    assert level(phase=Phase.WGRAD, fqn=f"{EMBEDDING}.weight", role=Role.WGRAD) is not Level.TENSOR


def test_an_addition_without_effect_is_said_to_be_one(tmp_path):
    """In-place arithmetic that leaves its target as it was: main_grad stays zero while dW is not."""
    zero = plant(phase="accumulate", slot="after", fqn=WEIGHT, step=0, microbatch=0, value=constant(0))
    diagnosis = both(tmp_path, {"level": Level.STATISTICS}, plants=[zero])
    (finding,) = diagnosis.findings
    assert finding.id == "wgrad.accumulation"
    assert any(line.startswith("in the candidate main_grad is the same after") for line in finding.evidence)


# what a careless kernel reads

STORAGE = np.arange(24, dtype=np.float32)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((3, 4), (4, 1), 0),
        ((3, 4), (1, 3), 0),
        ((3, 4), (4, 1), 5),
        ((3, 2), (4, 2), 1),
        ((2, 3, 4), (1, 8, 2), 0),
    ],
)
def test_read_ignoring_layout_is_the_front_of_the_storage(shape, stride, offset):
    seen = np.lib.stride_tricks.as_strided(STORAGE[offset:], shape, [4 * step for step in stride])
    read, known = read_ignoring_layout(
        np.ascontiguousarray(seen), Layout(stride=stride, storage_offset=offset, contiguous=False)
    )
    front = STORAGE[: seen.size].reshape(shape)
    assert np.array_equal(read[known], front[known])
    belongs = np.isin(STORAGE[: seen.size], seen).reshape(shape)
    assert np.array_equal(known, belongs)


# split: what core_attention sends back, and what reaches linear_qkv

ATTENTION = "decoder.layers.1.self_attention"
S, B, NP, HN = 5, 2, 3, 4
QKV = "core_attention[0], core_attention[1], core_attention[2]"


@dataclass(frozen=True)
class Lying:
    """A tensor, and how it lay when it was seen."""

    values: np.ndarray
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def layout(self) -> Layout:
        steps = tuple(s // self.values.itemsize for s in np.ascontiguousarray(self.values).strides)
        return Layout(stride=self.stride, storage_offset=self.offset, contiguous=steps == self.stride)


def dense(values):
    steps = np.ascontiguousarray(values).strides
    return Lying(values, tuple(step // values.itemsize for step in steps))


def lying(values, order):
    """Return values laid out densely with the axes in ``order``, outermost first."""
    stride, step = [0] * values.ndim, 1
    for axis in reversed(order):
        stride[axis], step = step, step * values.shape[axis]
    return Lying(values, tuple(stride))


def misread(tensor):
    """Read memory in order: independent of the product's code, for dense layouts."""
    order = np.argsort([-step for step in tensor.stride], kind="stable")
    return np.ascontiguousarray(tensor.values.transpose(order)).reshape(tensor.values.shape)


def write_backward(directory, parts, result, *, payloads=True, modules=("core_attention",) * 3):
    """Write a run in which ``modules`` send ``parts`` back and ``result`` reaches linear_qkv."""
    create_run(directory, {"parallel": RankCoordinates().sizes()})
    writer = RankWriter(directory, coordinates=RankCoordinates())
    weight = f"{ATTENTION}.linear_qkv.weight"
    writer.declare_parameters(
        [ParameterDeclaration(fqn=weight, shape=(4, 4), dtype="float32", trainable=True)]
    )
    dgrad = {"step": 0, "microbatch": 0, "phase": Phase.DGRAD}
    rows = [
        (RecordKey(**dgrad, fqn=f"{ATTENTION}.{module}", role=Role.GRAD_INPUT, slot=str(slot)), part)
        for slot, (module, part) in enumerate(zip(modules, parts, strict=True))
    ]
    qkv = f"{ATTENTION}.linear_qkv"
    rows.append((RecordKey(**dgrad, fqn=qkv, role=Role.GRAD_OUTPUT, slot="0"), dense(result)))
    wgrad = result.reshape(-1, result.shape[-1]).T @ result.reshape(-1, result.shape[-1])
    after = {"step": 0, "microbatch": 0, "phase": Phase.WGRAD, "role": Role.WGRAD}
    rows.append((RecordKey(**after, fqn=weight), dense(wgrad[:4, :4])))
    records, elements = [], {}
    for seq, (key, tensor) in enumerate(rows):
        values = np.ascontiguousarray(tensor.values)
        host = HostTensor(bits=values.view(np.uint32), dtype="float32")
        records.append(
            TensorRecord(
                seq=seq,
                key=key,
                shape=values.shape,
                dtype="float32",
                layout=tensor.layout,
                digest=digest_host(host, statistics=True),
            )
        )
        if payloads:
            elements[seq] = host
    writer.write_step(0, records, elements, microbatches=1)
    writer.close(complete=True)
    return directory


def gradients(count=3):
    draw = np.random.default_rng(0)
    return [draw.normal(size=(S, B, NP, HN)).astype(np.float32) for _ in range(count)]


def per_head(parts):
    """Megatron's ``mixed_qkv``: q, k and v of one head beside each other."""
    return np.concatenate(parts, axis=3).reshape(S, B, -1)


def per_tensor(parts):
    """All of q, then all of k, then all of v."""
    return np.concatenate([part.reshape(S, B, -1) for part in parts], axis=2)


def per_head_kqv(parts):
    return per_head([parts[1], parts[0], parts[2]])


ODD = (1, 2, 0, 3)
"""Memory order b, np, s, hn: what a batched matrix product over heads gives."""


@pytest.mark.parametrize("join", [per_head, per_tensor, per_head_kqv])
def test_split_that_ignores_strides_is_proved(join, tmp_path):
    parts = gradients()
    odd = [lying(part, ODD) for part in parts]
    baseline = write_backward(tmp_path / "a", [dense(part) for part in parts], join(parts))
    candidate = write_backward(tmp_path / "b", odd, join([misread(part) for part in odd]))
    diagnosis = compare_runs(baseline, candidate)
    first = diagnosis.first_divergence
    assert (first.key.phase, first.key.role, first.key.fqn) == (
        Phase.DGRAD, Role.GRAD_OUTPUT, f"{ATTENTION}.linear_qkv"
    )  # fmt: skip
    assert len(diagnosis.origins) == 1  # dW of linear_qkv follows
    (finding,) = (f for f in diagnosis.findings if f.severity is Severity.ERROR)
    assert finding.id == "layout.noncontiguous_grad"
    assert finding.proved_by_replay
    given = recipes(finding)
    right, careless = [
        next(name for name, sides in given.items() if sides == [s]) for s in ("baseline", "candidate")
    ]
    assert careless == f"{right}, strides ignored ([4, 60, 20, 1])"
    assert finding.replay.baseline_error == 0 < finding.replay.candidate_error
    assert any("they differ in their order alone" in line for line in finding.evidence)
    assert finding.title.endswith("; the candidate is wrong")
    assert "the candidate is wrong" in " ".join(render(diagnosis).split())
    assert finding.remedy.startswith("candidate: split with mint.chunk")


def test_layouts_that_both_runs_have_leave_it_to_the_replay_which_is_wrong(tmp_path):
    parts = gradients()
    odd = [lying(part, ODD) for part in parts]
    baseline = write_backward(tmp_path / "a", odd, per_head([misread(part) for part in odd]))
    candidate = write_backward(tmp_path / "b", odd, per_head(parts))
    finding = compare_runs(baseline, candidate).findings[0]
    assert finding.proved_by_replay
    assert finding.title.endswith("; the baseline is wrong")
    assert finding.remedy.startswith("baseline: ")
    assert "core_attention[1]: strides (4, 60, 20, 1) (not contiguous) in both runs" in finding.evidence


def test_parts_may_come_from_several_modules(tmp_path):
    """With rotary embeddings q and k reach the split from what follows it, v from the attention."""
    parts = gradients()
    modules = ("q_layernorm", "k_layernorm", "core_attention")
    odd = [dense(parts[0]), dense(parts[1]), lying(parts[2], ODD)]
    one = write_backward(tmp_path / "a", odd, per_head(parts), modules=modules)
    wrong = per_head([parts[0], parts[1], misread(odd[2])])
    finding = compare_runs(one, write_backward(tmp_path / "b", odd, wrong, modules=modules)).findings[0]
    assert finding.proved_by_replay
    assert (
        "q_layernorm[0], k_layernorm[1], core_attention[2] have the same bits on both sides"
        in finding.evidence
    )


def test_one_part_alone_may_be_misread(tmp_path):
    parts = gradients()
    odd = [dense(parts[0]), lying(parts[1], ODD), dense(parts[2])]
    baseline = write_backward(tmp_path / "a", [dense(part) for part in parts], per_head(parts))
    candidate = write_backward(tmp_path / "b", odd, per_head([parts[0], misread(odd[1]), parts[2]]))
    finding = compare_runs(baseline, candidate).findings[0]
    assert finding.proved_by_replay
    assert f"concatenate {QKV} along dim 3, strides ignored of core_attention[1] ([4, 60, 20, 1])" in recipes(
        finding
    )


def test_parts_with_other_axes_are_found(tmp_path):
    """Attention may see its inputs as [b, np, s, hn]; the split before it has [s, b, np, hn]."""
    parts = gradients()
    seen = [part.transpose(1, 2, 0, 3) for part in parts]  # dense here, permuted at the split
    odd = [dense(np.ascontiguousarray(part)) for part in seen]
    baseline = write_backward(tmp_path / "a", odd, per_head(parts))
    strange = [Lying(np.ascontiguousarray(part), lying(part, (1, 2, 0, 3)).stride) for part in seen]
    finding = compare_runs(
        baseline, write_backward(tmp_path / "b", strange, per_head([_flat(part) for part in strange]))
    ).findings[0]
    assert finding.id == "layout.noncontiguous_grad"
    assert finding.proved_by_replay
    assert any("permute" in name for name in recipes(finding))


def _flat(part):
    """Memory of a [b, np, s, hn] part, read as the split's [s, b, np, hn]."""
    order = np.argsort([-step for step in part.stride], kind="stable")
    return np.ascontiguousarray(part.values.transpose(order)).reshape(S, B, NP, HN)


def test_strided_parts_that_are_put_together_rightly_are_no_finding(tmp_path):
    parts = gradients()
    baseline = write_backward(tmp_path / "a", [dense(part) for part in parts], per_head(parts))
    candidate = write_backward(tmp_path / "b", [lying(part, ODD) for part in parts], per_head(parts))
    diagnosis = compare_runs(baseline, candidate)
    assert (diagnosis.status, diagnosis.findings) == (Verdict.IDENTICAL, ())


def test_another_order_without_a_strided_part_is_not_blamed_on_the_layout(tmp_path):
    parts = gradients()
    baseline = write_backward(tmp_path / "a", [dense(part) for part in parts], per_head(parts))
    candidate = write_backward(tmp_path / "b", [dense(part) for part in parts], per_tensor(parts))
    assert "layout.noncontiguous_grad" not in {f.id for f in compare_runs(baseline, candidate).findings}


def test_other_numbers_on_the_side_that_is_dense_are_not_blamed_on_the_layout(tmp_path):
    parts = gradients()
    baseline = write_backward(tmp_path / "a", [lying(part, ODD) for part in parts], per_head(parts))
    candidate = write_backward(tmp_path / "b", [dense(part) for part in parts], 2 * per_head(parts))
    assert "layout.noncontiguous_grad" not in {f.id for f in compare_runs(baseline, candidate).findings}


def test_without_elements_fingerprints_say_that_numbers_were_moved(tmp_path):
    parts = gradients()
    odd = [lying(part, ODD) for part in parts]
    baseline = write_backward(tmp_path / "a", [dense(p) for p in parts], per_head(parts), payloads=False)
    wrong = per_head([misread(part) for part in odd])
    diagnosis = compare_runs(baseline, write_backward(tmp_path / "b", odd, wrong, payloads=False))
    finding = diagnosis.findings[0]
    assert (finding.id, finding.confidence, finding.proved_by_replay) == (
        "layout.noncontiguous_grad",
        0.9,
        False,
    )
    assert "not proved by replay: the elements of the gradients were not kept" in finding.evidence
    capture = load_settings(write_files(diagnosis, tmp_path / "out")["refine"]).capture
    for module, role in (("core_attention", Role.GRAD_INPUT), ("linear_qkv", Role.GRAD_OUTPUT)):
        key = RecordKey(step=0, microbatch=0, phase=Phase.DGRAD, fqn=f"{ATTENTION}.{module}", role=role)
        assert capture.level_of(key) is Level.TENSOR


def test_what_lies_outside_the_tensor_is_not_guessed(tmp_path):
    parts = gradients()
    odd = [Lying(part, dense(part).stride, offset=7) for part in parts]
    wrong = [
        np.concatenate([np.full(7, 9, np.float32), part.ravel()[:-7]]).reshape(part.shape) for part in parts
    ]
    baseline = write_backward(tmp_path / "a", [dense(part) for part in parts], per_head(parts))
    finding = compare_runs(baseline, write_backward(tmp_path / "b", odd, per_head(wrong))).findings[0]
    assert finding.id == "layout.noncontiguous_grad"
    assert (finding.proved_by_replay, finding.replay.complete) == (False, False)
    assert any("lies outside the recorded tensors" in line for line in finding.evidence)


def test_an_operation_that_computes_says_that_it_cannot_be_replayed(tmp_path):
    parts = gradients()
    odd = [lying(part, ODD) for part in parts]
    baseline = write_backward(tmp_path / "a", [dense(part) for part in parts], 2 * per_head(parts))
    candidate = write_backward(tmp_path / "b", odd, 2 * per_head([misread(part) for part in odd]))
    finding = compare_runs(baseline, candidate).findings[0]
    assert (finding.id, finding.confidence) == ("layout.noncontiguous_grad", 0.55)
    assert any("the operation does more than move numbers" in line for line in finding.evidence)


def test_proofs_need_no_framework(tmp_path):
    """Both proofs in a process of their own, in which no framework may be imported."""
    import subprocess

    write_fake_run(tmp_path / "a", **ELEMENTS)
    write_fake_run(tmp_path / "b", **ELEMENTS, **WRONG)
    code = (
        "import sys; sys.modules.update(torch=None, mindspore=None);"
        "from mindspeed_precision.flow import compare_runs;"
        f"print(compare_runs({str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r}).findings[0].proved_by_replay)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("moved", [LINEAR, HEAD])
def test_each_side_is_proved_from_its_own_operands(moved, tmp_path):
    """Between frameworks dW agrees within tolerance only: a side's sum is made of that side's dW."""
    rounding = plant(phase="wgrad", role="wgrad", fqn=f"{moved}.weight", step=0, value=nudged(3))
    one = write_fake_run(tmp_path / "a", **ELEMENTS, plants=[rounding])
    diagnosis = compare_runs(one, write_fake_run(tmp_path / "b", **ELEMENTS, **WRONG), policy="tolerance")
    assert diagnosis.first_divergence.key.phase is Phase.ACCUMULATE
    finding = diagnosis.findings[0]
    assert (finding.id, finding.proved_by_replay) == ("layout.noncontiguous_accumulate", True)


def test_statistics_that_cannot_see_a_misread_sum_do_not_hide_it(tmp_path):
    """Norms agree where every operand is misread alike: the update is the first that a tolerance can see."""
    shape = {"microbatches": 3, "dot_grad": True, "steps": 3}
    rounding = plant(phase="wgrad", role="wgrad", fqn="*weight", step=0, value=nudged(3))
    one = write_fake_run(tmp_path / "a", **shape, plants=[rounding])
    diagnosis = compare_runs(one, write_fake_run(tmp_path / "b", **shape, **WRONG), policy="tolerance")
    assert diagnosis.first_divergence.key.phase is Phase.OPTIMIZER
    (finding,) = diagnosis.findings
    assert (finding.id, finding.proved_by_replay) == ("layout.noncontiguous_accumulate", False)
    assert finding.where.phase is Phase.ACCUMULATE
    assert set(finding.explains) == {origin.key for origin in diagnosis.origins}
    capture = load_settings(write_files(diagnosis, tmp_path / "out")["refine"]).capture
    after = RecordKey(**{**vars(finding.where), "microbatch": 1})
    assert capture.level_of(after) is Level.TENSOR


def test_within_tolerance_and_in_another_layout_is_no_finding_where_nothing_diverges(tmp_path):
    shape = {"microbatches": 3, "dot_grad": True}
    rounding = plant(phase="wgrad", role="wgrad", fqn=WEIGHT, step=1, value=nudged(3))
    one = write_fake_run(tmp_path / "a", **shape, plants=[rounding])
    diagnosis = compare_runs(one, write_fake_run(tmp_path / "b", **shape, transposed=ALL), policy="tolerance")
    assert (diagnosis.status, diagnosis.findings) == (Verdict.WITHIN_TOLERANCE, ())
