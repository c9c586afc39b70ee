"""Recompute an operation that only moves numbers, known by what entered and what left it, in numpy.

The backward of a split or a chunk is a concatenation; views and transposes around it move numbers too. In C
order every concatenation is: so many outer blocks, and in each a slab of every part. Searched are the order
of the parts, the number of blocks, and one permutation of the parts' axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.diagnose.moved import MOST_PARTS, Move, move_of
from mindspeed_precision.diagnose.recipes import first_possible, gives_only, proves
from mindspeed_precision.diagnose.storage import may_be_misread, read_ignoring_layout
from mindspeed_precision.errors import ReplayError
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import Finding, Layout, Origin, Replay, ReplayRecipe, Side

MOST_AXES = 4
"""Largest search: 24 orders of 4 parts, 24 permutations of axes, and a few numbers of blocks."""

_GLANCE = 16
"""Elements that are looked at before a whole recipe is tried."""

Layouts = dict[str, Layout]
"""Layout by name of the parts that are read without regard to it."""


@dataclass(frozen=True, kw_only=True)
class _Arrangement:
    """How the parts are put together.

    Attributes:
        axes: permutation of every part's axes.
        blocks: number of outer blocks.
        order: names of the parts within a block.
    """

    axes: tuple[int, ...]
    blocks: int
    order: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Moved:
    """One side: bits of what entered, by name, with layouts, and of what left."""

    parts: Mapping[str, NDArray[Any]]
    layouts: Layouts
    result: NDArray[Any]
    numbers: NDArray[Any]
    part_numbers: Mapping[str, NDArray[Any]]

    def mismatched(self, arrangement: _Arrangement, ignoring: Layouts) -> tuple[int, int]:
        """Return how many elements are not given bit for bit, and of how many nothing is known."""
        made, known = _arrange(self.parts, arrangement, ignoring)
        differs = made != self.result.ravel()
        return int(np.count_nonzero(differs & known)), int(np.count_nonzero(~known))

    def error(self, arrangement: _Arrangement) -> float:
        """Relative Frobenius distance of what left to what entered, put together as it should be."""
        exact = _arrange(self.part_numbers, arrangement, {})[0].astype(np.float64)
        size = float(np.linalg.norm(exact))
        return float(np.linalg.norm(self.numbers.ravel() - exact)) / size if size else 0.0


def replay_concatenation(facts: Facts, finding: Finding) -> Replay:
    """Put the recorded gradients of the first origin of a finding together, in every likely way.

    Each side's result is made of that side's own parts: they may differ within tolerance.

    Raises:
        ReplayError: nothing can be replayed, or no arrangement gives either side; says why.
        DumpError: elements that the index promises cannot be read.
    """
    origins = (origin for origin in facts.origins if origin.key in finding.explains)
    return first_possible(
        origins, lambda origin: _replay(facts, origin), nothing="no gradient among its records"
    )


def _replay(facts: Facts, origin: Origin) -> Replay:
    move = move_of(facts, origin)
    if move is None:
        raise ReplayError("what entered the operation was not recorded", where=origin.key.describe())
    _require(move, origin)
    sides = {side: _side(facts, side, move) for side in Side}
    tried = (_answer(origin, move, sides, arrangement) for arrangement in _search(sides))
    answers = []
    for answer in tried:
        answers.append(answer)
        if answer.proved:
            return answer
    if not answers:
        raise ReplayError(
            f"no arrangement of {move.names} gives either side: the operation does more than move numbers",
            where=origin.key.describe(),
        )
    return answers[0]


def _answer(origin: Origin, move: Move, sides: Mapping[Side, _Moved], arrangement: _Arrangement) -> Replay:
    recipes, unknown = _try(sides, arrangement)
    return Replay(
        key=origin.key,
        rank=move.result.rank,
        elements=move.result.candidate.numel,
        recipes=tuple(recipes),
        baseline_error=sides[Side.BASELINE].error(arrangement),
        candidate_error=sides[Side.CANDIDATE].error(arrangement),
        environment=f"numpy {np.__version__}",
        proved=proves(recipes) and not unknown,
        complete=not unknown,
    )


def _require(move: Move, origin: Origin) -> None:
    where = origin.key.describe()
    records = [
        record for pair in (move.result, *move.parts.values()) for record in (pair.baseline, pair.candidate)
    ]
    if any(record.payload is None for record in records):
        raise ReplayError(
            "the elements of the gradients were not kept",
            where=where,
            remedy="to prove it, rerun both with --precision-debug-config refine.yaml and compare again",
        )
    if len(move.parts) > MOST_PARTS or any(len(record.shape) > MOST_AXES for record in records):
        raise ReplayError(
            f"no recipe for more than {MOST_PARTS} tensors, or more than {MOST_AXES} dimensions", where=where
        )
    formats = {record.layout.format for record in records if record.layout is not None}
    if formats - {"", "ND"}:
        raise ReplayError(f"no recipe for the storage format {', '.join(sorted(formats))}", where=where)


def _side(facts: Facts, side: Side, move: Move) -> _Moved:
    run = facts.baseline if side is Side.BASELINE else facts.candidate
    rank = run.ranks[move.result.rank]
    one = side is Side.BASELINE
    records = {slot: pair.baseline if one else pair.candidate for slot, pair in move.parts.items()}
    hosts = {slot: rank.payload(record) for slot, record in records.items()}
    result = rank.payload(move.result.baseline if one else move.result.candidate)
    return _Moved(
        parts={slot: host.bits for slot, host in hosts.items()},
        layouts={slot: record.layout for slot, record in records.items() if record.layout is not None},
        result=result.bits,
        numbers=to_numbers(result),
        part_numbers={slot: to_numbers(host) for slot, host in hosts.items()},
    )


def _search(sides: Mapping[Side, _Moved]) -> Iterator[_Arrangement]:
    """Yield the arrangements that give a side bit for bit, each part read as its strides say.

    A misread part can look like one whose axes were permuted: several arrangements may give a side, and only
    the right one, with strides ignored, gives the other.
    """
    for arrangement in _arrangements(sides[Side.BASELINE].parts):
        for one in sides.values():
            if _glance(one, arrangement) and one.mismatched(arrangement, {})[0] == 0:
                yield arrangement
                break


def _arrangements(parts: Mapping[str, NDArray[Any]]) -> Iterator[_Arrangement]:
    ranks = {part.ndim for part in parts.values()}
    for axes in permutations(range(ranks.pop())) if len(ranks) == 1 else ():
        shapes = [[part.shape[axis] for axis in axes] for part in parts.values()]
        blocks = {prod(shape[:count]) for shape in shapes for count in range(len(shape))}
        fitting = [n for n in sorted(blocks) if all(n and part.size % n == 0 for part in parts.values())]
        for count in fitting:
            for order in permutations(parts):
                yield _Arrangement(axes=axes, blocks=count, order=order)


def _glance(side: _Moved, arrangement: _Arrangement) -> bool:
    """Compare the first elements of the first block, which are those of its first part."""
    part = side.parts[arrangement.order[0]]
    count = min(_GLANCE, part.size // arrangement.blocks)
    return bool(np.array_equal(part.transpose(arrangement.axes).flat[:count], side.result.flat[:count]))


def _arrange(
    parts: Mapping[str, NDArray[Any]], arrangement: _Arrangement, ignoring: Layouts
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return what the arrangement makes, flat, and which of its elements are known.

    Storage does not move with a permutation of axes: what ignores strides reads it as it lies.
    """
    slabs, known = [], []
    for slot in arrangement.order:
        part = parts[slot]
        if slot in ignoring:
            values, inside = read_ignoring_layout(part, ignoring[slot])
        else:
            values, inside = part.transpose(arrangement.axes), np.ones(part.shape, np.bool_)
        slabs.append(values.reshape(arrangement.blocks, -1))
        known.append(inside.reshape(arrangement.blocks, -1))
    return np.concatenate(slabs, axis=1).ravel(), np.concatenate(known, axis=1).ravel()


def _try(sides: Mapping[Side, _Moved], arrangement: _Arrangement) -> tuple[list[ReplayRecipe], int]:
    """Try the arrangement as it should be, then with the strides ignored of what may be misread."""
    recipes, unknown = [], 0
    for ignoring in _ignorings(sides.values()):
        counts = {side: one.mismatched(arrangement, ignoring) for side, one in sides.items()}
        recipe = ReplayRecipe(
            recipe=_describe(sides[Side.BASELINE], arrangement, ignoring),
            baseline_mismatched=counts[Side.BASELINE][0],
            candidate_mismatched=counts[Side.CANDIDATE][0],
            recorded_for=tuple(
                side
                for side, one in sides.items()
                if all(one.layouts.get(slot) == layout for slot, layout in ignoring.items())
            ),
        )
        recipes.append(recipe)
        if any(gives_only(recipe, side) for side in Side):
            unknown = max(unknown, *(missing for _, missing in counts.values()))
    return recipes, unknown


def _ignorings(sides: Iterable[_Moved]) -> Iterator[Layouts]:
    """Yield nothing ignored, then for each side all that may be misread, then each of these alone."""
    seen: list[Layouts] = [{}]
    for one in sides:
        odd = {slot: layout for slot, layout in one.layouts.items() if may_be_misread(layout)}
        for choice in (odd, *({slot: odd[slot]} for slot in odd)):
            if choice not in seen:
                seen.append(choice)
    yield from seen


def _describe(side: _Moved, arrangement: _Arrangement, ignoring: Layouts) -> str:
    shape = next(iter(side.parts.values())).shape
    permuted = [shape[axis] for axis in arrangement.axes]
    dim = next((d for d in range(len(shape)) if prod(permuted[:d]) == arrangement.blocks), None)
    moved = "" if list(arrangement.axes) == sorted(arrangement.axes) else f".permute{arrangement.axes}"
    parts = ", ".join(f"{name}{moved}" for name in arrangement.order)
    text = f"concatenate {parts} along {f'dim {dim}' if dim is not None else f'{arrangement.blocks} blocks'}"
    if not ignoring:
        return text
    strides = " and ".join(dict.fromkeys(map(_strides, ignoring.values())))
    whose = "" if len(ignoring) == len(side.parts) else f" of {', '.join(ignoring)}"
    return f"{text}, strides ignored{whose} ({strides})"


def _strides(layout: Layout) -> str:
    return f"{list(layout.stride)}" + (f" at {layout.storage_offset}" if layout.storage_offset else "")
