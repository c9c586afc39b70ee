"""The process group of a collective as the note of its records: ``over ranks 0, 2-3``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_WORDS = "over ranks "
_STEPPED = re.compile(r"(\d{1,6}) to (\d{1,6}) by (\d{1,6})")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_LONGEST = 120


def group_note(ranks: Sequence[int]) -> str:
    """Return what a record says of the group ``ranks`` (numbers in the world, in any order).

    ``over ranks 0-3, 8`` or, where they are evenly apart, ``over ranks 0 to 12 by 4``. Of a group of no such
    order, whose text would be long in every record: ``over 512 ranks``, which does not say which.
    """
    members = set(ranks)
    numbers = sorted(members)
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{_WORDS}{numbers[0]} to {numbers[-1]} by {steps.pop()}"
    starts = [number for number in numbers if number - 1 not in members]
    ends = [number for number in numbers if number + 1 not in members]
    parts = (str(one) if one == two else f"{one}-{two}" for one, two in zip(starts, ends, strict=True))
    text = _WORDS + ", ".join(parts)
    return text if len(text) <= _LONGEST else f"over {len(numbers)} ranks"


def ranks_of_note(note: str) -> tuple[int, ...]:
    """Return the ranks that a note of ``group_note`` names, ascending; none where it names none."""
    if not note.startswith(_WORDS):
        return ()
    said = note.removeprefix(_WORDS)
    stepped = _STEPPED.fullmatch(said)
    if stepped:
        first, last, step = map(int, stepped.groups())
        return tuple(range(first, last + 1, step)) if step else ()
    found: list[int] = []
    for part in said.split(", "):
        match = _RANGE.fullmatch(part)
        if match is None:
            return ()
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)
