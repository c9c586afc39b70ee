"""Samples as lines for a person, and as plain data for a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.counting import agree
from mindspeed_precision.samples.sources import TEXT, Sample
from mindspeed_precision.verify.pair.batches import CONTENT

if TYPE_CHECKING:
    from mindspeed_precision.samples.looking import Look
    from mindspeed_precision.samples.tokens import Decoder

_SIDES = ("baseline", "candidate")
_AROUND = 5
"""Numbers before the first difference that are shown."""

_SHOWN = 12
"""Numbers of a tensor that are shown."""

_LETTERS = 90
"""Letters of a text that are shown."""

_DECODED = ("tokens", "input_ids", "labels", TEXT)


def sample_lines(row: Sequence[Sample | None], decoder: Decoder | None) -> list[str]:
    """Return what is shown of a sample: of one side, or of two beside each other, differences in brackets."""
    lines = [_places(row)]
    names = list(dict.fromkeys(slot for sample in row if sample is not None for slot in sample.slots))
    width = max((len(name) for name in names), default=0)
    for name in sorted(names, key=lambda slot: (slot not in CONTENT, names.index(slot))):
        values = [None if sample is None else sample.slots.get(name) for sample in row]
        lines += [f"{name.ljust(width)}  {line}" for line in _slot_lines(name, values, decoder)]
    return lines


def _places(row: Sequence[Sample | None]) -> str:
    told = [
        "no more samples"
        if sample is None
        else sample.place + ("" if sample.number is None else f", sample {sample.number}")
        for sample in row
    ]
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"{side}: {place}" for side, place in zip(_SIDES, told, strict=False))


def _slot_lines(name: str, values: Sequence[NDArray[Any] | None], decoder: Decoder | None) -> list[str]:
    one = values[0]
    if len(values) == 1 or _equal(values[0], values[-1]):
        return [*_side_lines(name, one, decoder)]
    lines = []
    two = values[1]
    where = _differing(one, two)
    said = _summary(one, two, where)
    start = max(0, int(where[0]) - _AROUND) if where is not None and len(where) else 0
    marked = set() if where is None else set(where.tolist())
    for side, value in zip(_SIDES, values, strict=True):
        shown = "(absent)" if value is None else _numbers(value, start, marked)
        lines.append(f"{side:9}  {shown}")
        text = None if value is None else _text(name, value, decoder, start)
        lines += [] if text is None else [f"{'':9}  {text}"]
    return [*lines, f"{'':9}  {said}"]


def _side_lines(name: str, value: NDArray[Any] | None, decoder: Decoder | None) -> list[str]:
    if value is None:
        return []
    text = _text(name, value, decoder, 0)
    if name == TEXT and text is not None:
        return [text]
    return [_numbers(value, 0, set()), *([] if text is None else [text])]


def _equal(one: NDArray[Any] | None, two: NDArray[Any] | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.shape == two.shape and bool(np.array_equal(one, two, equal_nan=one.dtype.kind == "f"))


def _differing(one: NDArray[Any] | None, two: NDArray[Any] | None) -> NDArray[np.intp] | None:
    """Return where two tensors differ, of the part that both have; None: they cannot be laid together."""
    if one is None or two is None or one.ndim != two.ndim:
        return None
    if one.ndim > 1 and one.shape != two.shape:
        return None
    left, right = one.reshape(-1), two.reshape(-1)
    count = min(left.size, right.size)
    return np.flatnonzero(left[:count] != right[:count])


def _summary(one: NDArray[Any] | None, two: NDArray[Any] | None, where: NDArray[np.intp] | None) -> str:
    if one is None or two is None:
        return "on one side only"
    if where is None:
        return f"shapes {list(one.shape)} and {list(two.shape)}"
    parts = []
    if one.size != two.size:
        parts.append(f"{one.size} and {two.size} elements")
    if len(where):
        parts.append(
            f"{len(where)} of {min(one.size, two.size)} {agree(len(where), 'differ')}, first at {where[0]}"
        )
    return ", ".join(parts)


def _numbers(value: NDArray[Any], start: int, marked: set[int]) -> str:
    flat = value.reshape(-1)
    if value.ndim > 1 or flat.dtype.kind == "b":
        shape = "x".join(map(str, value.shape))
        head = f"[{shape}] {int(np.count_nonzero(flat))} of {flat.size} not zero"
        return head if not marked else f"{head}, from {start}: {_some(flat, start, marked)}"
    if flat.size > 1 and not marked and bool((flat == flat[0]).all()):
        return f"{_one(flat[0])} × {flat.size}"
    if (
        flat.size > 3
        and not marked
        and flat.dtype.kind in "iu"
        and bool((np.diff(flat.astype(np.int64)) == 1).all())
    ):
        return f"{_one(flat[0])} to {_one(flat[-1])}"
    before = "… " if start else ""
    after = f" … ({flat.size})" if start + _SHOWN < flat.size else ""
    return f"{before}{_some(flat, start, marked)}{after}"


def _some(flat: NDArray[Any], start: int, marked: set[int]) -> str:
    return " ".join(
        f"[{_one(flat[at])}]" if at in marked else _one(flat[at])
        for at in range(start, min(flat.size, start + _SHOWN))
    )


def _one(number: Any) -> str:
    return f"{number:g}" if isinstance(number, (float, np.floating)) else str(number)


def _text(name: str, value: NDArray[Any], decoder: Decoder | None, start: int) -> str | None:
    """Return the text of tokens from a place on, in quotes; None where these are none, or nobody decodes."""
    if name not in _DECODED or value.ndim != 1 or value.dtype.kind not in "iu":
        return None
    if name == TEXT:
        text = value.astype(np.uint8).tobytes()[start:].decode("utf-8", errors="replace")
    elif decoder is None:
        return None
    else:
        text = decoder.text([int(number) for number in value[start:]])
    quoted = repr(text[:_LETTERS])[1:-1]
    return f'{"…" if start else ""}"{quoted}{"…" if len(text) > _LETTERS else ""}"'


def plain_samples(look: Look) -> list[dict[str, Any]]:
    """Return the samples as plain data: every number, and where the sides differ."""
    return [_plain(row, look.decoder) for row in look.rows]


def _plain(row: Sequence[Sample | None], decoder: Decoder | None) -> dict[str, Any]:
    sides = dict(zip(_SIDES, row, strict=False))
    names = list(dict.fromkeys(slot for sample in row if sample is not None for slot in sample.slots))
    found: dict[str, Any] = {
        side: None
        if sample is None
        else {
            "place": sample.place,
            "number": sample.number,
            "slots": {name: value.tolist() for name, value in sample.slots.items()},
            "text": {
                name: decoder.text([int(one) for one in value])
                for name, value in sample.slots.items()
                if decoder is not None and name in _DECODED and name != TEXT and value.ndim == 1
            },
        }
        for side, sample in sides.items()
    }
    if len(row) == 2:
        found["differ"] = [name for name in names if not _equal(*_pair(row, name))]
    return found


def _pair(row: Sequence[Sample | None], name: str) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    one, two = (None if sample is None else sample.slots.get(name) for sample in row)
    return one, two


__all__ = ["plain_samples", "sample_lines"]
