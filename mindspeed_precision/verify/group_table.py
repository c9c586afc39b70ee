"""Every parameter of a run and how it is trained: its group, multipliers, dtypes, step counter, ties."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.records import INIT_STEP, ParameterDeclaration, Role

SHOWN = ("lr", "weight_decay", "eps", "beta1", "beta2", "momentum", "step")
"""Numbers that the optimizer applies, by their names in ``torch.optim``."""

OF_LAYOUT = "is_expert_parallel"
MULTIPLIERS = ("wd_mult", "lr_mult", "is_decoupled_lr", OF_LAYOUT)
"""What places a parameter into one of Megatron's groups."""


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One parameter of the whole model.

    Attributes:
        fqn: canonical name.
        shape: canonical shape; of what a rank holds where it is not known how it is split.
        dtype: as the model uses it.
        trainable: whether it requires a gradient, on any rank.
        tied: further names of it, and parameters of other pipeline stages that are kept equal to it.
        first: by name, the number that the optimizer applied in the first recorded step, else that its group
            had before it.
        multipliers: of its group (``wd_mult``, ``lr_mult`` …), where the optimizer has such.
        master: dtype of the copy that the optimizer updates; empty where it updates the parameter itself, or
            nothing says.
        grouped: whether some rank's optimizer has it in a group; None: nothing says.
        copied: on every rank that has it, it is a copy of another stage's parameter, kept equal.
        times: in how many groups of one rank it is at most, counted where the ranges overlap.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    tied: tuple[str, ...] = ()
    first: Mapping[str, float] = field(default_factory=dict)
    multipliers: Mapping[str, Any] = field(default_factory=dict)
    master: str = ""
    grouped: bool | None = None
    copied: bool = False
    times: int = 0


@dataclass
class _Member:
    """What is gathered of one parameter over the ranks."""

    declared: ParameterDeclaration | None = None
    trainable: bool = False
    tied: set[str] = field(default_factory=set)
    numbers: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    master: str = ""
    grouped: bool = False
    times: int = 0


def parameter_rows(run: Run, names: Mapping[str, str] | None = None) -> dict[str, ParameterRow]:
    """Return every parameter of a run by its canonical name, in the order of the model.

    Args:
        run: the run.
        names: names that were changed since it was recorded, ``{recorded: given}``.
    """
    found: dict[str, _Member] = defaultdict(_Member)
    told = False
    for rank in run.ranks.values():
        for parameter in rank.parameters:
            _declare(found[parameter.fqn], parameter)
        told = _add_groups(found, rank, names or {}) or told
    _add_numbers(found, run)
    updated = any(member.numbers for member in found.values())
    return {
        fqn: _row(fqn, member, told=told, updated=updated)
        for fqn, member in found.items()
        if member.declared is not None
    }


def _declare(member: _Member, parameter: ParameterDeclaration) -> None:
    placement = parameter.placement
    if placement is not None and placement.copy_of:
        member.tied.add(placement.copy_of)
    if parameter.tied_to:
        member.tied.add(parameter.tied_to)
    if member.declared is None or (placement and not placement.copy_of):
        member.declared = parameter
    member.trainable = member.trainable or parameter.trainable


def _add_groups(found: dict[str, _Member], rank: RankRecords, names: Mapping[str, str]) -> bool:
    """Add what the rank's optimizers hold; False where the rank did not say."""
    if not rank.effective:
        return False
    spans: dict[str, list[tuple[int, int] | None]] = defaultdict(list)
    for group in rank.effective["groups"]:
        for entry in group["parameters"]:
            fqn = names.get(entry["fqn"], entry["fqn"])
            member = found[fqn]
            member.grouped = True
            member.settings = member.settings or dict(group["settings"])
            member.master = entry["dtype"] if entry["copy"] else member.master
            spans[fqn].append(tuple(entry["range"]) if entry["range"] else None)
    for fqn, held in spans.items():
        found[fqn].times = max(found[fqn].times, _overlapping(held))
    for alias, first in rank.effective["tied"].items():
        found[names.get(first, first)].tied.add(names.get(alias, alias))
    return bool(rank.effective["groups"])


def _overlapping(spans: list[tuple[int, int] | None]) -> int:
    """Return how often an element is in the list at most; None is the whole parameter."""
    whole = sum(span is None for span in spans)
    counts = Counter(span for span in spans if span is not None)
    return whole + max(counts.values(), default=0)


def _add_numbers(found: dict[str, _Member], run: Run) -> None:
    for rank in run.ranks.values():
        first: dict[tuple[str, str], int] = {}
        for record in rank.records:
            key = record.key
            if key.role is not Role.HYPERPARAMETER or record.value is None or key.step == INIT_STEP:
                continue
            if first.setdefault((key.fqn, key.slot), key.step) == key.step:
                found[key.fqn].numbers[key.slot] = record.value


def _row(fqn: str, member: _Member, *, told: bool, updated: bool) -> ParameterRow:
    declared = member.declared
    assert declared is not None
    placement = declared.placement
    settings = {name: member.settings[name] for name in SHOWN if _is_number(member.settings.get(name))}
    numbers = {**settings, **{name: member.numbers[name] for name in SHOWN if name in member.numbers}}
    multipliers = {name: member.settings[name] for name in MULTIPLIERS if name in member.settings}
    multipliers |= {name: member.numbers[name] for name in MULTIPLIERS if name in member.numbers}
    grouped = member.grouped if told else bool(member.numbers) if updated else None
    return ParameterRow(
        fqn=fqn,
        shape=placement.shape if placement is not None else declared.shape,
        dtype=declared.dtype,
        trainable=member.trainable,
        tied=tuple(sorted(member.tied)),
        first=numbers,
        multipliers=multipliers,
        master=member.master,
        grouped=grouped,
        copied=placement is not None and bool(placement.copy_of),
        times=member.times,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
