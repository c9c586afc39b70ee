"""Replay of GEMMs that torch computed in two layouts: proof where there is one, else a reason."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.diagnose import replay_gemm
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    Layout,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    Side,
    TensorRecord,
)
from mindspeed_precision.report.console import render

ROWS, OUT, IN = 3000, 128, 128
NATURAL, TRANSPOSED = Layout(stride=(OUT, 1)), Layout(stride=(1, ROWS), contiguous=False)
PLAIN = Layout(stride=(IN, 1))
MODULE = "decoder.layers.0.mlp.linear_fc1"


def write_gemm(
    directory, grad_output, received, wgrad, layout, *, dtype="float16", payloads=True, numerics=None
):
    """Write a run of one GEMM; arrays are raw bits."""
    create_run(
        directory,
        {
            "parallel": RankCoordinates().sizes(),
            "numerics": {"num_threads": 1, "mkldnn": True, "device": "cpu", **(numerics or {})},
        },
    )
    writer = RankWriter(directory, coordinates=RankCoordinates())
    writer.declare_parameters(
        [ParameterDeclaration(fqn=f"{MODULE}.weight", shape=(OUT, IN), dtype=dtype, trainable=True)]
    )
    records, elements = [], {}
    rows = (
        (MODULE, Role.GRAD_OUTPUT, grad_output, layout),
        (MODULE, Role.INPUT, received, PLAIN),
        (MODULE, Role.WGRAD, wgrad, PLAIN),
        (f"{MODULE}.weight", Role.WGRAD, wgrad, PLAIN),
    )
    for seq, (fqn, role, bits, lay) in enumerate(rows):
        host = HostTensor(bits=bits, dtype=dtype)
        key = RecordKey(step=0, microbatch=0, phase=Phase.WGRAD, fqn=fqn, role=role)
        records.append(
            TensorRecord(
                seq=seq,
                key=key,
                shape=bits.shape,
                dtype=dtype,
                layout=lay,
                digest=digest_host(host, statistics=True),
            )
        )
        if payloads and fqn == MODULE:
            elements[seq] = host
    writer.write_step(0, records, elements, microbatches=1)
    writer.close(complete=True)
    return directory


@pytest.fixture(scope="module")
def gemm():
    """Operands and dW in two layouts, as raw bits, of a GEMM for which this CPU's kernels differ."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float16, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            left = torch.randn(ROWS, OUT, generator=generator).to(dtype)
            right = torch.randn(ROWS, IN, generator=generator).to(dtype)
            one, two = left.t().contiguous().matmul(right), left.t().matmul(right)
            if not torch.equal(one, two):
                bits = [t.view(torch.int16).numpy().view(np.uint16) for t in (left, right, one, two)]
                return str(dtype).removeprefix("torch."), *bits
    finally:
        torch.set_num_threads(threads)
    pytest.skip("on this CPU no layout changes a bit")


@pytest.mark.torch
def test_layout_is_proved_bit_for_bit(gemm, tmp_path):
    dtype, left, right, one, two = gemm
    baseline = write_gemm(tmp_path / "baseline", left, right, one, TRANSPOSED, dtype=dtype)
    candidate = write_gemm(tmp_path / "candidate", left, right, two, NATURAL, dtype=dtype)
    diagnosis = compare_runs(baseline, candidate)
    finding = diagnosis.findings[0]
    assert finding.id == "wgrad.operand_layout"
    assert finding.proved_by_replay
    by_side = {side: recipe for recipe in finding.replay.recipes for side in recipe.recorded_for}
    assert by_side[Side.BASELINE].recipe == "grad_output.t().contiguous() @ input"
    assert by_side[Side.BASELINE].baseline_mismatched == 0 < by_side[Side.BASELINE].candidate_mismatched
    assert by_side[Side.CANDIDATE].recipe == "grad_output.t() @ input"
    assert by_side[Side.CANDIDATE].candidate_mismatched == 0 < by_side[Side.CANDIDATE].baseline_mismatched
    assert finding.remedy == "candidate: --precision-debug-set remedies=[wgrad_contiguous_operands]"
    assert diagnosis.first_divergence.key.fqn == MODULE
    text = render(diagnosis)
    assert "proved by replay" in text
    assert "grad_output.t().contiguous() @ input   gives the baseline's dW bit for bit" in text
    assert "neither is wrong, but they must be the same" in " ".join(text.split())


@pytest.mark.torch
def test_layouts_that_were_recorded_the_wrong_way_round_prove_nothing(gemm, tmp_path):
    dtype, left, right, one, two = gemm
    baseline = write_gemm(tmp_path / "baseline", left, right, one, NATURAL, dtype=dtype)
    candidate = write_gemm(tmp_path / "candidate", left, right, two, TRANSPOSED, dtype=dtype)
    finding = compare_runs(baseline, candidate).findings[0]
    assert not finding.proved_by_replay
    assert not finding.replay.proved
    assert finding.confidence < 0.95


@pytest.mark.torch
def test_a_wrong_dw_is_blamed_on_its_side(gemm, tmp_path):
    dtype, left, right, one, _ = gemm
    wrong = np.where(np.arange(one.size).reshape(one.shape) % 3 == 0, one ^ 0x8000, one).astype(np.uint16)
    baseline = write_gemm(tmp_path / "baseline", left, right, one, TRANSPOSED, dtype=dtype)
    candidate = write_gemm(tmp_path / "candidate", left, right, wrong, TRANSPOSED, dtype=dtype)
    diagnosis = compare_runs(baseline, candidate)
    assert diagnosis.findings[0].id == "wgrad.value"
    assert not diagnosis.findings[0].proved_by_replay
    assert "suspect the candidate" in render(diagnosis)


def _simple(tmp_path, *, wgrad_two=None, **changes):
    """Write two runs whose dW differ, with numbers that need no framework."""
    left, right = np.full((ROWS, OUT), 0x3C00, np.uint16), np.full((ROWS, IN), 0x3C00, np.uint16)
    one, two = np.full((OUT, IN), 0x3C00, np.uint16), np.full((OUT, IN), 0x3C00, np.uint16)
    two[0, 0] = 0x3C01
    baseline = write_gemm(tmp_path / "baseline", left, right, one, TRANSPOSED, **changes)
    candidate = write_gemm(tmp_path / "candidate", left, right, two, NATURAL, **changes)
    return compare_runs(baseline, candidate).findings[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"payloads": False}, "the elements of the operands were not kept"),
        ({"numerics": {"device": "npu"}}, "the GEMM ran on npu"),
    ],
)
def test_what_cannot_be_replayed_says_why(changes, reason, tmp_path):
    finding = _simple(tmp_path, **changes)
    assert not finding.proved_by_replay
    assert finding.replay is None
    assert any(line.startswith(f"not proved by replay: {reason}") for line in finding.evidence)


def test_without_elements_the_remedy_is_a_second_pass(tmp_path):
    assert "--precision-debug-config refine.yaml" in _simple(tmp_path, payloads=False).remedy


def test_without_torch_the_finding_stays_unproved(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torch" else found(name, *a)
    )
    finding = _simple(tmp_path)
    assert finding.id == "wgrad.operand_layout"
    assert "not proved by replay: torch is not installed here" in finding.evidence


def test_a_failing_replay_process_is_a_reason_and_no_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_gemm, "WORKER", "mindspeed_precision.no_such_worker")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("without torch no process is started")
    finding = _simple(tmp_path)
    assert any("the replay process failed" in line for line in finding.evidence)
