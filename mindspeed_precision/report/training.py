"""What the two runs were given to do, side by side: groups, configuration, what could not be checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_precision.align.mapping import Mapping as NameMapping
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import CheckOutcome, Side
from mindspeed_precision.verify.group_table import ParameterRow
from mindspeed_precision.verify.pair import PAIR
from mindspeed_precision.verify.pair.configuration import JudgedDifference, judged_differences
from mindspeed_precision.verify.pair.groups import COLUMNS, cells_of
from mindspeed_precision.verify.pair_facts import PairFacts, pair_facts

_OWN = frozenset({"shape", "dtype", "tied to"})
"""Columns that are the parameter's own: parameters of one group have others of them."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters of one run that are trained alike.

    Attributes:
        settings: by column of ``verify``'s table, what they share.
        parameters: how many.
        elements: of them.
    """

    settings: dict[str, str]
    parameters: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class ParameterDifference:
    """A parameter that is not the same, or not trained alike, on both sides.

    Attributes:
        fqn: canonical name.
        cells: by column, baseline and candidate, where they differ.
    """

    fqn: str
    cells: dict[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What both runs were given to do.

    Attributes:
        groups: by side, parameters that are trained alike.
        parameters: how many names both sides have together.
        apart: the parameters that differ.
        arguments: how many names of the configuration both runs give a value.
        differences: those that differ, worst first.
        outcomes: what ``verify`` looked at, and what it could not look at.
    """

    groups: dict[Side, tuple[Group, ...]]
    parameters: int
    apart: tuple[ParameterDifference, ...]
    arguments: int
    differences: tuple[JudgedDifference, ...]
    outcomes: tuple[CheckOutcome, ...]


def training_of(baseline: Run, candidate: Run, mappings: Sequence[NameMapping]) -> Training:
    """Put side by side what two runs were given to do.

    Raises:
        IncomparableError: the fingerprints are of two definitions and elements were not kept.
        ConfigError: a mapping speaks of neither run, or gives two records one name.
    """
    facts = pair_facts(baseline, candidate, mappings)
    _, outcomes = PAIR.ask_all(facts)
    arguments, differences = judged_differences(facts)
    names = list(dict.fromkeys([*facts.row_names(Side.BASELINE), *facts.row_names(Side.CANDIDATE)]))
    return Training(
        groups={side: _groups(facts, side) for side in Side},
        parameters=len(names),
        apart=tuple(_apart(facts, names)),
        arguments=arguments,
        differences=tuple(sorted(differences, key=_badness)),
        outcomes=outcomes,
    )


def _badness(judged: JudgedDifference) -> tuple[int, str]:
    order = ("error", "warning", "", "info")
    return order.index(judged.severity.value if judged.severity else ""), judged.difference.name


def _groups(facts: PairFacts, side: Side) -> tuple[Group, ...]:
    found: dict[tuple[tuple[str, str], ...], list[ParameterRow]] = {}
    for fqn in facts.row_names(side):
        row = facts.rows[side][fqn]
        shared = [(name, cell) for name, cell in zip(COLUMNS, cells_of(row), strict=True) if name not in _OWN]
        found.setdefault(tuple(shared), []).append(row)
    groups = [
        Group(settings=dict(shared), parameters=len(rows), elements=sum(_elements(row) for row in rows))
        for shared, rows in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.elements))


def _elements(row: ParameterRow) -> int:
    count = 1
    for size in row.shape:
        count *= size
    return count


def _apart(facts: PairFacts, names: Sequence[str]) -> list[ParameterDifference]:
    found = []
    for fqn in names:
        one, two = (cells_of(facts.rows[side].get(fqn)) for side in Side)
        cells = {name: (a, b) for name, a, b in zip(COLUMNS, one, two, strict=True) if a != b}
        if cells:
            found.append(ParameterDifference(fqn=fqn, cells=cells))
    return found
