"""Which arithmetic on this CPU shows the layout of a GEMM's operand: tried, since it depends on the CPU.

``python -m mindspeed_precision.testing.demo.probe`` multiplies matrices of the demo's own shapes with a
transposed view and with its contiguous copy, and prints what it found as JSON. A process of its own, so that
its caller needs no torch.
"""

from __future__ import annotations

import json
import sys

import torch

TOKENS = 1280
"""More than 1024: oneDNN sums bf16 products in blocks of 1024."""

SHAPES = ((192, 64), (64, 64), (256, 64), (64, 256))
"""``[out, in]`` of the demo's linears: qkv, proj, fc1 and output_layer, fc2."""

ARITHMETICS = (("bf16", True), ("fp16", True), ("bf16", False))
"""(dtype, with oneDNN): bf16 first, since that is what the case is about."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def differing_elements(dtype: str, onednn: bool) -> dict[str, int]:
    """Return for each shape of dW how many of its elements depend on the layout of ``grad_output.t()``.

    Args:
        dtype: ``bf16`` or ``fp16``.
        onednn: let oneDNN compute.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = onednn
    try:
        return {f"{out}x{inner}": _differing(out, inner, _DTYPES[dtype]) for out, inner in SHAPES}
    finally:
        torch.backends.mkldnn.enabled = before


def _differing(out: int, inner: int, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(out * inner)
    grad_output = torch.randn(TOKENS, out, generator=generator).to(dtype)
    layer_input = torch.randn(TOKENS, inner, generator=generator).to(dtype)
    view = grad_output.t().matmul(layer_input)
    copy = grad_output.t().contiguous().matmul(layer_input)
    return int((view != copy).sum())


def main() -> None:
    """Print the first arithmetic with a difference, or ``null``."""
    torch.set_num_threads(1)
    for dtype, onednn in ARITHMETICS:
        found = differing_elements(dtype, onednn)
        if any(found.values()):
            json.dump({"dtype": dtype, "onednn": onednn, "differing": found}, sys.stdout)
            return
    json.dump(None, sys.stdout)


if __name__ == "__main__":
    main()
