"""Conventions of a mapping applied to pairs: an output that lacks its bias on one side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from mindspeed_precision.align.mapping import BiasConvention
from mindspeed_precision.align.mapping import Mapping as NameMapping
from mindspeed_precision.records import (
    INIT_STEP,
    Addend,
    Pair,
    Phase,
    RecordKey,
    Role,
    Side,
    TensorRecord,
)

_Records = Mapping[RecordKey, TensorRecord]


def with_conventions(
    pairs: Iterable[Pair],
    mappings: Mapping[Side, Sequence[NameMapping]],
    records: Mapping[Side, _Records],
) -> list[Pair]:
    """Return the pairs, those of outputs that lack a bias on one side with what must be added.

    Args:
        pairs: of one rank.
        mappings: by the side that they speak of.
        records: of that rank, by side.
    """
    conventions = [
        (side, convention)
        for side, of_side in mappings.items()
        for mapping in of_side
        for convention in mapping.outputs_without_bias
    ]
    if not conventions:
        return list(pairs)
    updated = {
        side: {key.fqn for key in found if key.phase is Phase.OPTIMIZER and key.role is Role.PARAM}
        for side, found in records.items()
    }
    return [_with_addend(pair, conventions, records, updated) for pair in pairs]


def _with_addend(
    pair: Pair,
    conventions: Iterable[tuple[Side, BiasConvention]],
    records: Mapping[Side, _Records],
    updated: Mapping[Side, set[str]],
) -> Pair:
    key = pair.key
    if key.phase is not Phase.FPROP or key.role is not Role.OUTPUT:
        return pair
    for side, convention in conventions:
        if key.slot == convention.slot and fnmatchcase(key.fqn, convention.fqn):
            name = f"{key.fqn}.{convention.bias}"
            bias = _bias(records[side], name, key.step, changes=name in updated[side])
            return replace(pair, addend=Addend(side=side, record=bias, reason=f"output excludes {name}"))
    return pair


def _bias(records: _Records, fqn: str, step: int, *, changes: bool) -> TensorRecord | None:
    """Return a parameter as a step found it: after the step before, or before the first; None: unknown."""
    if step == 0 or not changes:
        return records.get(RecordKey(step=INIT_STEP, phase=Phase.INIT, fqn=fqn, role=Role.PARAM))
    return records.get(RecordKey(step=step - 1, phase=Phase.OPTIMIZER, fqn=fqn, role=Role.PARAM))
