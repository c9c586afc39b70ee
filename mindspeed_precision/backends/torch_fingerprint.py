"""Fingerprints in torch operations, on the tensor's own device (``record.fingerprint``).

Each 16 bits, of elements of one byte each 8, are multiplied by a key of 64 bits: few operations, and none
that depends on the sign of an integer. Where a device is made for integers of 32 bits, keys are taken 16 bits
at a time, and no sum leaves 32 bits before there is one number per block.
"""

from __future__ import annotations

import torch

from mindspeed_precision.backends import torch_tables as tables
from mindspeed_precision.backends.torch_tables import signed
from mindspeed_precision.record.fingerprint import (
    MULTIPLIERS,
    OFFSET,
    SHIFT16,
    SPREAD,
    SPREAD16,
)

_MASK16, _MASK32 = (1 << 16) - 1, (1 << 32) - 1

_ROW = 1 << 10
"""Numbers of 16 bits that are added up in 32 bits."""

_BIAS = 1 << 27
"""Makes products of elements of 16 bits positive."""


def short_lanes(device: torch.device) -> bool:
    """Tell whether a device computes with integers of 32 bits rather than of 64."""
    return device.type == "npu"


def fingerprint_sums(flat: torch.Tensor, start: int) -> torch.Tensor:
    """Return both fingerprints of elements that follow each other in the canonical tensor, ``[2]`` int64.

    Args:
        flat: ``[n]`` integers of the elements' width, n above 0.
        start: canonical index of the first.
    """
    units, table = _units(flat)
    size, device = table.size, flat.device
    each = units.numel() // flat.numel()
    first, last, sums = start * each, start * each + units.numel(), []
    if last <= size:  # as most of a model's tensors; few operations
        keys = tables.FIRST[table].rows(first, last - first, device)
        ordered = _dot(units, keys)
        return torch.cat([ordered, unordered_sum(flat)])
    while first < last:  # a part of a block, whole blocks, a part of a block
        block, within = divmod(first, size)
        blocks = 0 if within else (last - first) // size
        count = blocks * size or min(size - within, last - first)
        keys = table.rows(within, min(count, size), device)
        rows = _dot(units[:count].view(-1, keys.numel()), keys)
        sums.append((rows * tables.BLOCKS.rows(block, len(rows), device)).sum(0, keepdim=True))
        units, first = units[count:], first + count
    return torch.cat([_added(sums), unordered_sum(flat)])


def scattered_sums(flat: torch.Tensor, index: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return both fingerprints of elements anywhere in the canonical tensor, ``[2]`` int64.

    Args:
        flat: ``[n]`` integers of the elements' width, n above 0.
        index: ``[n]`` int64, their canonical indices.
        blocks: of the canonical tensor.
    """
    units, table = _units(flat)
    each = units.numel() // flat.numel()
    places = index
    if each > 1:
        inner = torch.arange(each, dtype=torch.int64, device=flat.device)
        places = (index * each).unsqueeze(1).add(inner).reshape(-1)
    keys = table.rows(0, table.size, flat.device)[places & (table.size - 1)]
    weights = tables.BLOCKS.rows(0, blocks, flat.device)[places >> (table.size.bit_length() - 1)]
    ordered = _unsigned(units).mul_(keys).mul_(weights).sum(0, keepdim=True)
    return torch.cat([ordered, unordered_sum(flat)])


def _units(flat: torch.Tensor) -> tuple[torch.Tensor, tables.Table]:
    if flat.dtype.itemsize == 1:
        return flat, tables.BYTES
    return flat if flat.dtype == torch.int16 else flat.view(torch.int16), tables.HALVES


def _unsigned(units: torch.Tensor) -> torch.Tensor:
    wide = units.to(torch.int64)
    return wide if units.dtype == torch.uint8 else wide.bitwise_and_(_MASK16)


def _added(sums: list[torch.Tensor]) -> torch.Tensor:
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _dot(units: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiply units by ``[k]`` keys and add up, to int64: ``[n, k]`` to ``[n]``, and ``[k]`` to ``[1]``."""
    if not short_lanes(units.device):
        products = _unsigned(units).mul_(keys)
        return products.sum(0, keepdim=True) if units.dim() == 1 else products.sum(1)
    short = units.to(torch.int32).bitwise_and_(_MASK16).view(-1, keys.numel())
    total = torch.zeros(len(short), dtype=torch.int64, device=units.device)
    for shift in (0, 16, 32, 48):
        digit = ((keys >> shift) & _MASK16).to(torch.int32)
        total += _sum_of_products(short * digit) << shift
    return total


def _sum_of_products(products: torch.Tensor) -> torch.Tensor:
    """Add up ``[n, k]`` unsigned numbers in int32 over k, which is at most 4096, to ``[n]`` int64."""
    low = (products & _MASK16).sum(1, dtype=torch.int32).to(torch.int64)
    high = ((products >> 16) & _MASK16).sum(1, dtype=torch.int32).to(torch.int64)
    return low + (high << 16)


def unordered_sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the unordered fingerprint of elements, ``[1]`` int64.

    Args:
        flat: ``[n]`` integers of the elements' width, n above 0.
    """
    if flat.dtype.itemsize <= 2:
        return _unordered16(flat)
    words = flat if flat.dtype == torch.int32 else flat.view(torch.int32)
    upper = (words >> 16).bitwise_and_(_MASK16).mul_(_int32(SPREAD))
    spread, offset = upper.add_(words, alpha=_int32(SPREAD << 16 & _MASK32)), _int32(OFFSET)  # rot16(x) * K
    if flat.dtype.itemsize == 4:
        return _products(words + offset, spread)
    words, spread = words.view(-1, 2), spread.view(-1, 2)
    return _products(words[:, 1] + spread[:, 0] + offset, words[:, 0] + spread[:, 1])


def _products(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Multiply unsigned numbers in int32, ``[n]`` each, to 64 bits, and add up, to ``[1]``."""
    if not short_lanes(one.device):
        wide = [factor.to(torch.int64).bitwise_and_(_MASK32) for factor in (one, two)]
        return wide[0].mul_(wide[1]).sum(0, keepdim=True)
    halves = [(factor & _MASK16, (factor >> 16) & _MASK16) for factor in (one, two)]
    total = torch.zeros(1, dtype=torch.int64, device=one.device)
    for place, low in enumerate(halves[0]):
        for other, high in enumerate(halves[1]):
            total += _sum_of_products(_rows(low * high)).sum(0, keepdim=True) << 16 * (place + other)
    return total


def _unordered16(flat: torch.Tensor) -> torch.Tensor:
    """Return the unordered fingerprint of elements of 16 bits in int16, or of 8 in uint8."""
    elements = flat if flat.dtype == torch.int16 else flat.to(torch.int16)
    spread = elements * _int16(SPREAD16)
    short = (spread >> SHIFT16).bitwise_and_(_MASK16 >> SHIFT16).bitwise_or_(1).to(torch.int32)
    first, second = (_short_products(factor, short) for factor in (elements, spread))
    return first.mul_(signed(MULTIPLIERS[0])).add_(second, alpha=signed(MULTIPLIERS[1]))


def _short_products(factor: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
    """Multiply elements of 16 bits by numbers of 11, ``[n]`` each, and add up, to ``[1]`` int64."""
    products = short * factor
    if not short_lanes(factor.device):
        return products.sum(0, keepdim=True, dtype=torch.int64)
    biased = _sum_of_products(_rows(products + _BIAS)).sum(0, keepdim=True)
    return biased - _BIAS * products.numel()


def _rows(values: torch.Tensor) -> torch.Tensor:
    """Reshape ``[n]`` to rows of ``_ROW`` numbers, of which the last are zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % _ROW)).view(-1, _ROW)


def _int32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _int16(value: int) -> int:
    return value - (1 << 16) if value >> 15 else value
