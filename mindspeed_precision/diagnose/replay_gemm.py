"""Recompute one dW from its captured operands, by every recipe that may have made it.

This module only prepares the job and reads the answer; ``backends.torch_replay`` computes, as a process of
its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.diagnose.facts import Facts, pair_of
from mindspeed_precision.diagnose.recipes import first_possible, proves
from mindspeed_precision.errors import ReplayError
from mindspeed_precision.records import (
    Finding,
    Layout,
    Origin,
    Pair,
    Phase,
    Replay,
    ReplayRecipe,
    Role,
    Side,
    TensorRecord,
)

TIMEOUT_S = 600
"""A replay that takes longer is given up; float64 on a large GEMM is slow on a CPU."""

WORKER = "mindspeed_precision.backends.torch_replay"
_DTYPES = ("float16", "bfloat16", "float32")


def replay_gemm(facts: Facts, finding: Finding) -> Replay:
    """Replay the first dW that a finding about a GEMM accounts for.

    Raises:
        ReplayError: nothing can be replayed; says why.
        DumpError: elements that the index promises cannot be read.
    """
    return _run(facts, _choose(facts, finding))


@dataclass(frozen=True, kw_only=True)
class _Gemm:
    """One dW with everything that its computation needs."""

    rank: int
    wgrad: Pair
    grad_output: Pair
    received: Pair


def _choose(facts: Facts, finding: Finding) -> _Gemm:
    """Return the first GEMM of a finding whose elements both runs kept.

    Raises:
        ReplayError: there is none; says why of the first one.
    """
    origins = (
        origin
        for origin in facts.origins
        if origin.key in finding.explains
        and origin.key.phase is Phase.WGRAD
        and origin.key.role is Role.WGRAD
    )
    nothing = "no GEMM among the records that it concerns"
    return first_possible(origins, lambda origin: _gemm(facts, origin), nothing=nothing)


def _gemm(facts: Facts, origin: Origin) -> _Gemm:
    wgrad = pair_of(origin.comparison)
    operands = {pair.key.role: pair for pair in facts.operands(origin)}
    where = origin.key.describe()
    if len(operands) < 2:
        raise ReplayError("the operands of the GEMM were not recorded", where=where)
    gemm = _Gemm(
        rank=wgrad.rank, wgrad=wgrad, grad_output=operands[Role.GRAD_OUTPUT], received=operands[Role.INPUT]
    )
    records = [record for pair in (gemm.wgrad, gemm.grad_output, gemm.received) for record in _both(pair)]
    if any(record.payload is None for record in records):
        raise ReplayError(
            "the elements of the operands were not kept",
            where=where,
            remedy="to prove it, rerun both with --precision-debug-config refine.yaml and compare again",
        )
    for pair in (gemm.grad_output, gemm.received):
        if not pair.baseline.digest.same_bits(pair.candidate.digest):
            raise ReplayError("the operands differ within tolerance", where=where)
    dtypes = {record.dtype for record in records}
    if len(dtypes) > 1:
        raise ReplayError(
            f"dW is {gemm.wgrad.candidate.dtype} and the operands {gemm.received.candidate.dtype} "
            "(fused accumulation), which no recipe covers",
            where=where,
        )
    if not dtypes <= set(_DTYPES) or any(len(record.shape) != 2 for record in records):
        raise ReplayError(f"no recipe for {', '.join(dtypes)} operands of these shapes", where=where)
    return gemm


def _both(pair: Pair) -> tuple[TensorRecord, TensorRecord]:
    return pair.baseline, pair.candidate


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """One way to compute dW, and for whom it is the recorded one."""

    name: str
    method: str
    grad_output: Layout
    received: Layout
    numerics: Mapping[str, Any]
    recorded_for: tuple[Side, ...]


def _run(facts: Facts, gemm: _Gemm) -> Replay:
    device = facts.setting(Side.CANDIDATE, "numerics", "device") or "cpu"
    if device != "cpu":
        raise ReplayError(
            f"the GEMM ran on {device}, and replay runs on the CPU, whose bits say nothing of it"
        )
    if importlib.util.find_spec("torch") is None:
        raise ReplayError(
            "torch is not installed here", remedy="compare where torch is installed to prove it"
        )
    recipes = _recipes(facts, gemm)
    with tempfile.TemporaryDirectory(prefix="replay-") as directory:
        job = Path(directory) / "job.json"
        job.write_text(json.dumps(_job(facts, gemm, recipes, Path(directory))))
        _call_worker(job, _environment(facts))
        answer = json.loads(job.with_name("answer.json").read_text())
    return _read_answer(gemm, recipes, answer)


def _recipes(facts: Facts, gemm: _Gemm) -> list[_Recipe]:
    """Return the recipes to try: what each side recorded, the two usual ones, other ways to accumulate."""
    numerics = {side: _numerics(facts, side) for side in Side}
    settings = (
        list(numerics.values())
        if len(set(map(_frozen, numerics.values()))) > 1
        else [numerics[Side.BASELINE]]
    )
    rows, columns = gemm.grad_output.candidate.shape
    natural, plain = Layout(stride=(columns, 1)), Layout(stride=(gemm.received.candidate.shape[1], 1))
    transposed = Layout(stride=(1, rows), contiguous=False)
    layouts = [(_layout(gemm.grad_output, side), _layout(gemm.received, side)) for side in Side]
    layouts += [(transposed, plain), (natural, plain)]
    found: dict[str, _Recipe] = {}
    for setting in settings:
        suffix = f"   ({_describe_numerics(setting)})" if len(settings) > 1 else ""
        ways = [("matmul", _expression(gemm, *pair), pair) for pair in layouts]
        ways += [
            ("fp32", "operands and sum in float32, then rounded", (natural, plain)),
            ("split_k", "sum of the two halves of the tokens", (natural, plain)),
            ("float64", "operands and sum in float64, then rounded", (natural, plain)),
        ]
        for method, name, (left, right) in ways:
            recorded = tuple(
                side
                for side, pair in zip(Side, layouts, strict=False)
                if method == "matmul"
                and _strides(*pair) == _strides(left, right)
                and numerics[side] == setting
            )
            recipe = _Recipe(
                name=name + suffix,
                method=method,
                grad_output=left,
                received=right,
                numerics=setting,
                recorded_for=recorded,
            )
            found.setdefault(recipe.name, recipe)
    return list(found.values())


def _numerics(facts: Facts, side: Side) -> Mapping[str, Any]:
    names = ("num_threads", "mkldnn", "deterministic_algorithms")
    return {name: facts.setting(side, "numerics", name) for name in names}


def _frozen(numerics: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in numerics.items())


def _describe_numerics(numerics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in numerics.items() if value is not None)


def _layout(pair: Pair, side: Side) -> Layout:
    record = pair.baseline if side is Side.BASELINE else pair.candidate
    return record.layout or Layout(stride=(record.shape[1], 1))


def _strides(*layouts: Layout) -> tuple[tuple[int, ...], ...]:
    return tuple((*layout.stride, layout.storage_offset) for layout in layouts)


def _expression(gemm: _Gemm, left: Layout, right: Layout) -> str:
    """Write the GEMM as a person would have written it to get these layouts."""
    rows, columns = gemm.grad_output.candidate.shape
    width = gemm.received.candidate.shape[1]
    known_left: dict[tuple[int, ...], str] = {
        (columns, 1): "grad_output.t()",
        (1, rows): "grad_output.t().contiguous()",
    }
    known_right: dict[tuple[int, ...], str] = {(width, 1): "input", (1, rows): "input.t().contiguous().t()"}
    one = known_left.get(tuple(left.stride), f"grad_output{list(left.stride)}.t()")
    two = known_right.get(tuple(right.stride), f"input{list(right.stride)}")
    offsets = (
        ""
        if left.storage_offset == right.storage_offset == 0
        else (f"   (offsets {left.storage_offset}, {right.storage_offset})")
    )
    return f"{one} @ {two}{offsets}"


def _job(facts: Facts, gemm: _Gemm, recipes: Iterable[_Recipe], directory: Path) -> dict[str, Any]:
    """Write the elements beside the job; operands have the same bits on both sides, so the baseline's do."""
    one, two = facts.baseline.ranks[gemm.rank], facts.candidate.ranks[gemm.rank]
    tensors = {
        "grad_output": one.payload(gemm.grad_output.baseline),
        "input": one.payload(gemm.received.baseline),
        "baseline": one.payload(gemm.wgrad.baseline),
        "candidate": two.payload(gemm.wgrad.candidate),
    }
    return {
        "dtype": gemm.wgrad.baseline.dtype,
        "tensors": {name: _save(directory, name, tensor) for name, tensor in tensors.items()},
        "recipes": [
            {
                "method": recipe.method,
                "numerics": dict(recipe.numerics),
                "layouts": {
                    name: {"stride": list(layout.stride), "storage_offset": layout.storage_offset}
                    for name, layout in (("grad_output", recipe.grad_output), ("input", recipe.received))
                },
            }
            for recipe in recipes
        ],
    }


def _save(directory: Path, name: str, tensor: HostTensor) -> str:
    np.save(directory / f"{name}.npy", np.ascontiguousarray(tensor.bits), allow_pickle=False)
    return f"{name}.npy"


def _environment(facts: Facts) -> dict[str, str]:
    """Return this process's environment, with what chooses CPU kernels as the candidate had it."""
    recorded = facts.candidate.manifest.get("environment")
    prefixes = ("OMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_")
    chosen = recorded.items() if isinstance(recorded, dict) else ()
    return {**os.environ, **{k: str(v) for k, v in chosen if k.startswith(prefixes) and v is not None}}


def _call_worker(job: Path, environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", WORKER, str(job)],
            env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ReplayError(f"it took longer than {TIMEOUT_S} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ReplayError(f"the replay process failed: {last}")


def _read_answer(gemm: _Gemm, recipes: Sequence[_Recipe], answer: Mapping[str, Any]) -> Replay:
    results = tuple(
        ReplayRecipe(
            recipe=recipe.name,
            baseline_mismatched=counts["baseline"],
            candidate_mismatched=counts["candidate"],
            recorded_for=recipe.recorded_for,
        )
        for recipe, counts in zip(recipes, answer["recipes"], strict=True)
    )
    numerics = _describe_numerics(recipes[0].numerics)
    return Replay(
        key=gemm.wgrad.key,
        rank=gemm.rank,
        elements=gemm.wgrad.candidate.numel,
        recipes=results,
        baseline_error=answer["errors"]["baseline"],
        candidate_error=answer["errors"]["candidate"],
        environment=f"torch {answer['torch']}, {numerics}",
        proved=proves(results),
    )
