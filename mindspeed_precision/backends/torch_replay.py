"""Recompute one dW with torch: a process of its own, so that comparing never imports torch.

``python -m mindspeed_precision.backends.torch_replay JOB.json`` reads a job (``diagnose.replay`` writes it)
and
writes its answer beside it. Operands are rebuilt with the strides that they had, since that is what chooses
the kernel's order of summation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def main(arguments: Sequence[str]) -> int:
    """Run the job that ``arguments`` names."""
    path = Path(arguments[0])
    job = json.loads(path.read_text())
    answer = replay(job, path.parent)
    path.with_name("answer.json").write_text(json.dumps(answer))
    return 0


def replay(job: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Compute dW by every recipe of a job.

    Args:
        job: ``dtype``; ``tensors`` (names of files of raw bits: ``grad_output`` [N, O], ``input`` [N, I], and
        dW
            of both sides [O, I]); ``recipes``, each with ``method``, the ``layouts`` of both operands, and
            ``numerics``.
        directory: where the files are.

    Returns:
        ``recipes`` (mismatched elements against each side), ``errors`` (relative Frobenius distance of each
        side to float64), ``torch`` (version).
    """
    tensors = {name: _load(directory / file, job["dtype"]) for name, file in job["tensors"].items()}
    grad_output, received = tensors["grad_output"], tensors["input"]
    recipes = []
    for recipe in job["recipes"]:
        _set_numerics(recipe["numerics"])
        left = _lay_out(grad_output, recipe["layouts"]["grad_output"])
        right = _lay_out(received, recipe["layouts"]["input"])
        wgrad = _METHODS[recipe["method"]](left, right)
        recipes.append({side: _mismatched(wgrad, tensors[side]) for side in ("baseline", "candidate")})
    exact = grad_output.double().t() @ received.double()
    size = float(exact.norm())
    errors = {side: _distance(tensors[side], exact, size) for side in ("baseline", "candidate")}
    return {"recipes": recipes, "errors": errors, "torch": str(torch.__version__)}


def _load(path: Path, dtype: str) -> torch.Tensor:
    bits = np.load(path, allow_pickle=False)
    return torch.from_numpy(bits.view(_SIGNED[bits.dtype.itemsize])).view(getattr(torch, dtype))


def _lay_out(values: torch.Tensor, layout: Mapping[str, Any]) -> torch.Tensor:
    """Return ``values`` with the strides and the offset of ``layout``; stride 0 expands a dimension."""
    stride = layout["stride"]
    sizes = [1 if step == 0 else size for size, step in zip(values.shape, stride, strict=True)]
    last = sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))
    storage = torch.zeros(layout["storage_offset"] + last + 1, dtype=values.dtype)
    view = storage.as_strided(sizes, stride, layout["storage_offset"])
    view.copy_(values[tuple(slice(0, size) for size in sizes)])
    return view.expand(values.shape)


def _set_numerics(numerics: Mapping[str, Any]) -> None:
    if numerics.get("num_threads"):
        torch.set_num_threads(int(numerics["num_threads"]))
    if numerics.get("mkldnn") is not None:
        torch.backends.mkldnn.set_flags(bool(numerics["mkldnn"]))
    if numerics.get("deterministic_algorithms") is not None:
        torch.use_deterministic_algorithms(bool(numerics["deterministic_algorithms"]), warn_only=True)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.t().matmul(right)


def _through_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.float().t().matmul(right.float()).to(left.dtype)


def _split_k(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    half = len(left) // 2
    return left[:half].t().matmul(right[:half]) + left[half:].t().matmul(right[half:])


def _through_fp64(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.double().t().matmul(right.double()).to(left.dtype)


_METHODS = {"matmul": _matmul, "fp32": _through_fp32, "split_k": _split_k, "float64": _through_fp64}


def _mismatched(one: torch.Tensor, two: torch.Tensor) -> int:
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return int((one.contiguous().view(kind) != two.contiguous().view(kind)).sum())


def _distance(tensor: torch.Tensor, exact: torch.Tensor, size: float) -> float:
    return float((tensor.double() - exact).norm()) / size if size else 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
