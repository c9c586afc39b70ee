"""Recompute one accumulation of a gradient, in numpy: as it should be, and with strides ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.diagnose.facts import Facts, pair_of
from mindspeed_precision.diagnose.graph import Node
from mindspeed_precision.diagnose.recipes import first_possible, proves
from mindspeed_precision.diagnose.storage import may_be_misread, read_ignoring_layout
from mindspeed_precision.errors import ReplayError
from mindspeed_precision.record.elements import to_bits, to_numbers
from mindspeed_precision.records import (
    Finding,
    Layout,
    Origin,
    Pair,
    Replay,
    ReplayRecipe,
    Role,
    Side,
    TensorRecord,
)

_DTYPES = ("float16", "bfloat16", "float32", "float64")

Operands = dict[str, Layout]
"""Layout by name of the operand (``main_grad``, ``dW``) of those that are read without regard to it."""


def replay_accumulation(facts: Facts, finding: Finding) -> Replay:
    """Add the recorded operands of the first sum of a finding whose elements both runs kept.

    Each side's sum is recomputed from that side's own operands: they may differ within tolerance.

    Raises:
        ReplayError: nothing can be replayed; says why of the first sum.
        DumpError: elements that the index promises cannot be read.
    """
    origins = (origin for origin in facts.origins if origin.key in finding.explains)
    return first_possible(
        origins, lambda origin: _replay(facts, origin), nothing="no accumulation among its records"
    )


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """One side's accumulation: what was added, in order, and what came out."""

    operands: dict[str, HostTensor]
    layouts: Operands
    result: HostTensor

    def mismatched(self, ignoring: Operands) -> tuple[int, int]:
        """Return how many elements the recipe does not give bit for bit, and how many it says nothing of."""
        known = np.ones(self.result.bits.shape, np.bool_)
        total: NDArray[np.floating] | None = None
        wide = np.float64 if self.result.dtype == "float64" else np.float32
        for name, host in self.operands.items():
            numbers = to_numbers(host).astype(wide)
            if name in ignoring:
                numbers, inside = read_ignoring_layout(numbers, ignoring[name])
                known &= inside
            total = numbers if total is None else total + numbers
        assert total is not None
        differs = to_bits(total, self.result.dtype) != self.result.bits
        return int(np.count_nonzero(differs & known)), int(np.count_nonzero(~known))

    @property
    def error(self) -> float:
        """Relative Frobenius distance of the recorded sum to the sum of the operands in float64."""
        exact = sum(to_numbers(host).astype(np.float64) for host in self.operands.values())
        size = float(np.linalg.norm(np.ravel(exact)))
        return float(np.linalg.norm(np.ravel(to_numbers(self.result) - exact))) / size if size else 0.0


def accumulated(facts: Facts, total: Node) -> dict[str, Pair]:
    """Return what a sum was made of, by name: ``main_grad`` before it, where there was one, and ``dW``."""
    wanted = Role.BGRAD if total.key.fqn.endswith(".bias") else Role.WGRAD
    found: dict[str, Pair] = {}
    for node in facts.graph.consumed(total):
        pair = node.comparison.pair
        if isinstance(pair, Pair) and node.rank == total.rank:
            if node.key.phase is total.key.phase and node.key.occurrence == total.key.occurrence:
                found.setdefault("main_grad", pair)
            elif node.key.role is wanted:
                found.setdefault("dW", pair)
    return found


def _replay(facts: Facts, origin: Origin) -> Replay:
    result, operands = pair_of(origin.comparison), accumulated(facts, facts.node_of(origin))
    _require(origin, result, operands)
    sides = {side: _side(facts, side, result, operands) for side in Side}
    recipes, unknown = [], 0
    for ignoring in _recipes(sides.values()):
        counts = {side: one.mismatched(ignoring) for side, one in sides.items()}
        unknown = max(unknown, *(missing for _, missing in counts.values()))
        recipes.append(
            ReplayRecipe(
                recipe=_describe(list(operands), ignoring),
                baseline_mismatched=counts[Side.BASELINE][0],
                candidate_mismatched=counts[Side.CANDIDATE][0],
                recorded_for=tuple(side for side in Side if _recorded(sides[side], ignoring)),
            )
        )
    return Replay(
        key=origin.key,
        rank=result.rank,
        elements=result.candidate.numel,
        recipes=tuple(recipes),
        baseline_error=sides[Side.BASELINE].error,
        candidate_error=sides[Side.CANDIDATE].error,
        environment=f"numpy {np.__version__}",
        proved=proves(recipes) and not unknown,
        complete=not unknown,
    )


def _require(origin: Origin, result: Pair, operands: dict[str, Pair]) -> None:
    where = origin.key.describe()
    if "dW" not in operands:
        raise ReplayError("dW was not recorded as it arrived", where=where)
    pairs = [result, *operands.values()]
    records = [record for pair in pairs for record in (pair.baseline, pair.candidate)]
    if any(record.payload is None for record in records):
        raise ReplayError(
            "the elements of main_grad and dW were not kept",
            where=where,
            remedy="to prove it, rerun both with --precision-debug-config refine.yaml and compare again",
        )
    kinds = {record.dtype for record in records}
    if not kinds <= set(_DTYPES) or len({record.shape for record in records}) > 1:
        raise ReplayError(f"no recipe for a sum of {', '.join(sorted(kinds))} of these shapes", where=where)
    formats = {record.layout.format for record in records if record.layout is not None}
    if formats - {"", "ND"}:
        raise ReplayError(f"no recipe for the storage format {', '.join(sorted(formats))}", where=where)


def _side(facts: Facts, side: Side, result: Pair, operands: dict[str, Pair]) -> _Sum:
    run = facts.baseline if side is Side.BASELINE else facts.candidate
    rank = run.ranks[result.rank]
    records = {name: _of(pair, side) for name, pair in operands.items()}
    return _Sum(
        operands={name: rank.payload(record) for name, record in records.items()},
        layouts={name: record.layout for name, record in records.items() if record.layout is not None},
        result=rank.payload(_of(result, side)),
    )


def _of(pair: Pair, side: Side) -> TensorRecord:
    return pair.baseline if side is Side.BASELINE else pair.candidate


def _recipes(sides: Iterable[_Sum]) -> Iterator[Operands]:
    """Yield which operands are read without regard to which layout: none, then every choice of a side's."""
    seen: list[Operands] = [{}]
    yield {}
    for side in sides:
        odd = {name: layout for name, layout in side.layouts.items() if may_be_misread(layout)}
        for count in range(len(odd), 0, -1):
            for chosen in combinations(odd, count):
                ignoring = {name: odd[name] for name in chosen}
                if ignoring not in seen:
                    seen.append(ignoring)
                    yield ignoring


def _recorded(side: _Sum, ignoring: Operands) -> bool:
    return all(side.layouts.get(name) == layout for name, layout in ignoring.items())


def _describe(operands: list[str], ignoring: Operands) -> str:
    expression = " + ".join(operands)
    if not ignoring:
        return expression
    layouts = [
        f"{name} {list(layout.stride)}" + (f" at {layout.storage_offset}" if layout.storage_offset else "")
        for name, layout in ignoring.items()
    ]
    return f"{expression}, strides ignored of {' and '.join(layouts)}"
