"""Laws of gradients, checked on the device while training runs: nothing is waited for, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from mindspeed_precision.backends.torch_digest import widest_float
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.record.freivalds import LAMBDA, TF32, growth, own_error, signs

_PIECE = 1 << 23
"""Elements that are widened at a time."""


@torch.no_grad()
def product_excess(
    product: torch.Tensor, left: torch.Tensor, right: torch.Tensor, sides: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Compare ``product`` with ``left.T @ right`` as ``record.freivalds.excess`` does, in pieces.

    Args:
        product: ``[out, in]``.
        left: ``[tokens, out]``.
        right: ``[tokens, in]``.
        sides: ``[out, in]`` each, sums whose difference ``product`` is.

    Returns:
        ``[1]``, the largest residual over its bound.
    """
    device, wide = product.device, widest_float(product.device)
    tokens, columns = right.shape
    with torch.autocast(device_type=device.type, enabled=False):
        probes = _signs(columns, device, wide)
        exact = torch.zeros((product.shape[0], probes.shape[1]), dtype=wide, device=device)
        sizes = torch.zeros(product.shape[0], dtype=wide, device=device)
        for one, two in zip(_pieces(left, columns), _pieces(right, left.shape[1]), strict=True):
            first, second = one.to(wide), two.to(wide)
            exact += first.t() @ (second @ probes)
            sizes += first.abs().t() @ torch.linalg.vector_norm(second, dim=1)
        found = torch.cat([piece.to(wide) @ probes for piece in _pieces(product, 0)])
        share = growth(tokens, _roundoff(torch.promote_types(product.dtype, torch.float32)))
        share += 2 * _operands(left) + own_error(tokens, columns, double=wide is torch.float64)
        bound = share * sizes + 2 * _roundoff(product.dtype) * _row_norms(product, wide)
        for side in sides:
            bound += 2 * _roundoff(side.dtype) * _row_norms(side, wide)
        worst = (found - exact).abs().amax(dim=1)
        # nothing is off by nothing where there is nothing
        return torch.where(worst == 0, worst, worst / (LAMBDA * bound)).amax().reshape(1)


def not_the_sum(total: torch.Tensor, before: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return ``[1]``, how many elements of ``total`` are not ``before + added`` as ``add_`` makes it."""
    with torch.no_grad():
        expected = before.clone().add_(added)
        same = (expected == total) | (expected.isnan() & total.isnan())
        return (~same).sum().reshape(1)


def _pieces(tensor: torch.Tensor, beside: int) -> Iterator[torch.Tensor]:
    """Yield rows in pieces of at most ``_PIECE`` elements, of the wider of two operands."""
    rows = max(_PIECE // max(tensor.shape[1], beside, 1), 1)
    return (tensor[start : start + rows] for start in range(0, max(len(tensor), 1), rows))


def _row_norms(tensor: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.linalg.vector_norm(piece.to(wide), dim=1) for piece in _pieces(tensor, 0)])


@lru_cache(maxsize=64)
def _signs(columns: int, device: torch.device, wide: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(signs(columns)).to(device, wide)


def _roundoff(dtype: torch.dtype) -> float:
    return UNIT_ROUNDOFF.get(str(dtype).removeprefix("torch."), UNIT_ROUNDOFF["float32"])


def _operands(tensor: torch.Tensor) -> float:
    """Return the roundoff to which a device first rounds operands of float32."""
    if tensor.dtype is not torch.float32 or tensor.device.type == "cpu":
        return 0.0
    return 0.0 if matmul_precision(tensor.device) == "highest" else TF32


def matmul_precision(device: torch.device) -> str:
    """Return how exactly float32 is multiplied: ``highest``, or a name of something narrower."""
    if device.type == "npu":
        return "hf32" if torch.npu.matmul.allow_hf32 else "highest"
    return str(torch.get_float32_matmul_precision())
