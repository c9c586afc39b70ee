"""What depends on positions alone, kept per device: keys of the fingerprint, signs and turns of the sketch.

A table is filled on the stream that first needs it; other streams wait for that on the device, not on the
host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_precision.record.fingerprint import BLOCK_SEED, MASK64, MULTIPLIERS, SHIFTS, half_keys
from mindspeed_precision.record.sketch import BUCKETS, SIGN_SEED, TURN_SEED

TABLE_LIMIT = 1 << 22
"""Entries of a table that are kept per device (32 MiB); those beyond are computed when needed."""

KEPT_BLOCKS = 1 << 8
"""Blocks of 256 elements of which the sketch's turns are kept per device (0.5 MiB): all of a small tensor."""

SIGN_BIT = -(1 << 63)


def signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number of 64 bits."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


_MULTIPLIERS = tuple(signed(value) for value in MULTIPLIERS)
_SHIFTS = tuple((shift, MASK64 >> shift) for shift in SHIFTS)


def mix(values: torch.Tensor) -> torch.Tensor:
    """Apply ``mix64`` in place to int64 ``values``; ``>>`` copies the sign, the masks take it away."""
    for (shift, mask), multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        values.bitwise_xor_((values >> shift).bitwise_and_(mask))
        if multiplier is not None:
            values.mul_(multiplier)
    return values


def block_keys(blocks: torch.Tensor) -> torch.Tensor:
    """Return F of blocks, ``[n]`` int64, which it overwrites."""
    return mix(blocks.add_(signed(BLOCK_SEED))).bitwise_or_(1)


def sign_bits(index: torch.Tensor) -> torch.Tensor:
    """Return the sketch's signs of positions, ``[n]`` int64: the top bit alone where it is minus."""
    return _signs_of(mix((index >> 6).add_(signed(SIGN_SEED))), index & 63)


def turns(blocks: torch.Tensor) -> torch.Tensor:
    """Return what the sketch adds to positions in blocks of 256, ``[n]`` int64, which it overwrites."""
    return mix(blocks.add_(signed(TURN_SEED)))


def _signs_of(drawn: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return (drawn >> place).bitwise_left_shift_(63)


def _range(start: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int64, device=device)


def _halves(start: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(half_keys().astype("int64").tolist(), device=device)[start : start + count]


def _bytes(start: int, count: int, device: torch.device) -> torch.Tensor:
    keys = _halves(0, len(half_keys()), device)
    return torch.stack([keys, keys << 8], 1).reshape(-1)[start : start + count]


def _first_of(
    keys: Callable[[int, int, torch.device], torch.Tensor],
) -> Callable[[int, int, torch.device], torch.Tensor]:
    return lambda start, count, device: keys(start, count, device) * block_keys(_range(0, 1, device))


def _blocks(start: int, count: int, device: torch.device) -> torch.Tensor:
    return block_keys(_range(start, count, device))


def _signs(start: int, count: int, device: torch.device) -> torch.Tensor:
    first, last = start // 64, -(-(start + count) // 64)
    drawn = mix(_range(first, last - first, device).add_(signed(SIGN_SEED)))
    signs = _signs_of(drawn.unsqueeze(1), _range(0, 64, device)).reshape(-1)
    return signs[start - first * 64 :][:count]


def _sources(start: int, count: int, device: torch.device) -> torch.Tensor:
    turned = turns(_range(start, count, device)).unsqueeze(1)
    return _range(0, BUCKETS, device).sub(turned).bitwise_and_(BUCKETS - 1)


class Table:
    """Rows that are computed from their number, and kept up to a limit.

    Args:
        compute: ``(start, count, device)`` to ``[count, ...]``.
        least: rows that are computed at once, at the least.
        limit: rows that are kept, at the most.

    Attributes:
        size: ``least``: of a table that is as long as a block, that.
    """

    def __init__(
        self,
        compute: Callable[[int, int, torch.device], torch.Tensor],
        *,
        least: int,
        limit: Callable[[], int] = lambda: TABLE_LIMIT,
    ) -> None:
        self._compute, self.size, self._limit = compute, least, limit
        self._kept: dict[torch.device, _Kept] = {}
        self._lock = threading.Lock()

    def rows(self, start: int, count: int, device: torch.device) -> torch.Tensor:
        """Return rows ``[start, start + count)``."""
        limit = self._limit()
        if start + count > limit:
            return self._compute(start, count, device)
        kept = self._kept.get(device)
        if kept is None or kept.table.shape[0] < start + count:
            size = min(limit, max(self.size, 1 << (start + count - 1).bit_length()))
            with self._lock:
                kept = self._kept[device] = _Kept(self._compute(0, size, device))
        return kept.here()[start : start + count]


class _Kept:
    """A table, and the moment on its stream from which it can be read."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self._stream = _stream(table.device)
        self._ready = None if self._stream is None else self._stream.record_event()

    def here(self) -> torch.Tensor:
        """Return the table for work on the current stream."""
        if self._ready is not None:
            current = _stream(self.table.device)
            if current != self._stream:
                current.wait_event(self._ready)
        return self.table


def _stream(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else getattr(torch, device.type).current_stream(device)


def _always(rows: int) -> Callable[[], int]:
    return lambda: rows


HALVES = Table(_halves, least=len(half_keys()), limit=_always(len(half_keys())))
"""``[2048]`` int64: what each 16 bits of a block of the fingerprint are multiplied by."""

BYTES = Table(_bytes, least=2 * len(half_keys()), limit=_always(2 * len(half_keys())))
"""``[4096]`` int64: the same for each byte."""

FIRST = {
    HALVES: Table(_first_of(_halves), least=HALVES.size, limit=_always(HALVES.size)),
    BYTES: Table(_first_of(_bytes), least=BYTES.size, limit=_always(BYTES.size)),
}
"""The keys of the first block, multiplied by its F."""

BLOCKS = Table(_blocks, least=1 << 10)
"""``[n]`` int64: F of the fingerprint's blocks."""

SIGNS = Table(_signs, least=1 << 16)
"""``[n]`` int64: the sketch's signs."""

SOURCES = Table(_sources, least=KEPT_BLOCKS, limit=_always(KEPT_BLOCKS))
"""``[n, 256]`` int64: the element of each block of 256 that each bucket of the sketch takes."""
