"""What a record is of: a module, which of its tensors, or a parameter; and where that sits."""

from __future__ import annotations

import re
from dataclasses import replace

from mindspeed_precision.record.placement import EMBEDDING_GROUP
from mindspeed_precision.records import (
    COLLECTIVES,
    NO_MICROBATCH,
    ParameterDeclaration,
    Phase,
    Placement,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
    Unplaced,
)

_OF_MODULES = frozenset({Phase.FPROP, Phase.DGRAD, Phase.WGRAD})
_NOBODYS = "collective"
"""Name of collectives that belong to no module (``capture.collectives``); they are counted per rank."""

_GROUPED = re.compile(r".*\.experts\.weight\d+")
"""A weight of several experts, which are others on other ranks."""

Slot = tuple[str, Role, str]
"""Name of a module, and which of its tensors."""


def slot_of(key: RecordKey) -> Slot:
    """Return which tensor of which module a record is of."""
    return key.fqn, key.role, key.slot


def of_module(key: RecordKey) -> bool:
    """Tell whether a record is of a module's forward or backward, and not of a collective of nobody's."""
    return key.phase in _OF_MODULES and key.microbatch != NO_MICROBATCH and key.fqn != _NOBODYS


def of_collective(key: RecordKey) -> bool:
    """Tell whether a record is of what a collective is given, or gives back."""
    return key.slot.partition(".")[0] in COLLECTIVES


def placement_of(parameter: ParameterDeclaration, where: RankCoordinates) -> Placement | None:
    """Return where a parameter sits; one that nothing splits is whole also where its run does not say so."""
    other_experts = where.ep_size > 1 and _GROUPED.fullmatch(parameter.fqn)
    if parameter.placement is None and where.tp_size == 1 and not other_experts:
        return Placement(shape=parameter.shape)
    return parameter.placement


def place_of(record: TensorRecord, where: RankCoordinates) -> Placement | Unplaced:
    """Return where an activation sits, or why that is not known."""
    if record.place is not None:
        return record.place
    if not where.splits_tensors:
        return Placement(shape=record.shape)
    return Unplaced(reason=f"no layout rule for {record.key.role.value} in {record.key.phase.value}")


def summed(placement: Placement, key: RecordKey, name: str) -> Placement:
    """Return the placement of a gradient before its reduction; dW at a GEMM is of one use of a weight."""
    alone = placement.partial == EMBEDDING_GROUP and key.fqn != name
    return replace(placement, partial="") if alone else placement


def canonical_key(key: RecordKey, name: str, placement: Placement) -> RecordKey:
    """Return the key without what the layout put into it."""
    if placement.copy_of and key.fqn == name:
        key = replace(key, fqn=placement.copy_of)
    if key.role is Role.REDUCED_GRAD and key.slot:
        key = replace(key, slot="")  # the range of a distributed optimizer
    return key
