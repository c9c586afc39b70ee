"""Mapping files: what two runs of one model name differently, lack, or keep by another convention.

A mapping is data (``configs/mappings/*.yaml``, ``docs/mapping.md``), frozen once it is read. It changes names
of records as they are aligned; no file of a run is touched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mindspeed_precision.config import read_document
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import RecordKey, Side

_CAPTURE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class Rename:
    """One way in which a side's names differ.

    Attributes:
        source: pattern of the name, or of its leading part up to a dot; ``{layer}`` stands for one part
            between dots and is carried over.
        target: the other run's name.
        pattern: ``source``, compiled.
    """

    source: str
    target: str
    pattern: re.Pattern[str]

    def apply(self, fqn: str) -> tuple[int, str] | None:
        """Return how much of ``fqn`` it speaks of, and the new name; None: nothing."""
        found = self.pattern.match(fqn)
        if found is None:
            return None
        parts = found.groupdict()
        return found.end(), _CAPTURE.sub(lambda m: parts[m.group(1)], self.target) + fqn[found.end() :]


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Records, and parameters, that one run has and the other cannot have.

    Attributes:
        fqn: shell pattern on the name as aligned, after renaming.
        role: shell pattern; parameters are dropped from the declaration where it fits ``param``.
        phase: shell pattern.
        slot: shell pattern.
        reason: why they have no counterpart.
    """

    fqn: str
    role: str
    phase: str
    slot: str
    reason: str

    def applies(self, key: RecordKey) -> bool:
        """Tell whether it speaks of ``key``."""
        fields = (
            (key.fqn, self.fqn),
            (key.role.value, self.role),
            (key.phase.value, self.phase),
            (key.slot, self.slot),
        )
        return all(fnmatchcase(text, pattern) for text, pattern in fields)

    def drops_parameter(self, fqn: str) -> bool:
        """Tell whether it speaks of a declared parameter."""
        return fnmatchcase(fqn, self.fqn) and fnmatchcase("param", self.role) and self.phase == "*"


@dataclass(frozen=True, kw_only=True)
class BiasConvention:
    """Modules whose recorded output lacks the bias that the other run's output has.

    Attributes:
        fqn: shell pattern on the module's name as aligned.
        slot: slot of the output.
        bias: name of the bias after the module's.
    """

    fqn: str
    slot: str
    bias: str


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """What differs between two runs by name or convention, for one side.

    Attributes:
        where: the file, for messages.
        side: ``baseline``, ``candidate``, or the name of a framework that one of the runs used.
        names: renames of the side's records and parameters; the one that speaks of most of a name counts.
        drop: what only that side has.
        outputs_without_bias: modules of that side.
    """

    where: str
    side: str
    names: tuple[Rename, ...] = ()
    drop: tuple[Drop, ...] = ()
    outputs_without_bias: tuple[BiasConvention, ...] = ()

    def side_of(self, baseline: Run, candidate: Run) -> Side:
        """Return the run that it speaks of.

        Raises:
            ConfigError: no run, or both runs, used the framework that it names.
        """
        if self.side in (side.value for side in Side):
            return Side(self.side)
        frameworks = {Side.BASELINE: baseline.framework, Side.CANDIDATE: candidate.framework}
        fitting = [side for side, name in frameworks.items() if name == self.side]
        if len(fitting) == 1:
            return fitting[0]
        raise ConfigError(
            "a mapping must speak of one of the two runs",
            where=f"{self.where}: side",
            found=self.side,
            expected="baseline, candidate, or the framework of one run: "
            + ", ".join(f"{name or 'unknown'} ({side.value})" for side, name in frameworks.items()),
        )

    def rename(self, fqn: str) -> tuple[str, Rename | None]:
        """Return a name as the other run has it, and the rename that did it."""
        best: tuple[int, str, Rename] | None = None
        for rename in self.names:
            found = rename.apply(fqn)
            if found is not None and (best is None or found[0] > best[0]):
                best = (*found, rename)
        return (fqn, None) if best is None else best[1:]


@dataclass
class _Drop:
    fqn: str = "*"
    role: str = "*"
    phase: str = "*"
    slot: str = "*"
    reason: str = ""


@dataclass
class _Bias:
    fqn: str = ""
    slot: str = "0"
    bias: str = "bias"


@dataclass
class _Schema:
    schema: int = 1
    side: str = ""
    names: list[dict[str, str]] = field(default_factory=list)
    drop: list[_Drop] = field(default_factory=list)
    outputs_without_bias: list[_Bias] = field(default_factory=list)


def load_mapping(file: str | Path) -> Mapping:
    """Read a mapping file.

    Raises:
        ConfigError: there is no such file, or it is no mapping.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError("no such mapping file", where="mapping", found=str(file), expected="a YAML file")
    plain = read_document(path, _Schema, kind="mapping", remedy="see docs/mapping.md")
    return _freeze(str(path), plain)


def _freeze(where: str, plain: dict[str, Any]) -> Mapping:
    if not plain["side"]:
        raise ConfigError(
            "a mapping must say which run it speaks of",
            where=f"{where}: side",
            expected="baseline, candidate, or the name of a framework",
        )
    drops = tuple(Drop(**entry) for entry in plain["drop"])
    for number, drop in enumerate(drops):
        if not drop.reason.strip():
            raise ConfigError(
                "a drop without a reason", where=f"{where}: drop[{number}]", expected="reason: why"
            )
    return Mapping(
        where=where,
        side=plain["side"],
        names=tuple(read_rename(f"{where}: names[{n}]", entry) for n, entry in enumerate(plain["names"])),
        drop=drops,
        outputs_without_bias=tuple(BiasConvention(**entry) for entry in plain["outputs_without_bias"]),
    )


def read_rename(where: str, entry: dict[str, str]) -> Rename:
    """Return a rename of ``{from, to}``, its pattern compiled.

    Raises:
        ConfigError: it has other keys, or the new name uses what the pattern does not capture.
    """
    if set(entry) != {"from", "to"} or not entry["from"] or not entry["to"]:
        raise ConfigError(
            "not a rename", where=where, found=", ".join(sorted(entry)) or "nothing", expected="from and to"
        )
    source, target = entry["from"], entry["to"]
    text, position, seen = "", 0, set()
    for capture in _CAPTURE.finditer(source):
        name = capture.group(1)
        text += re.escape(source[position : capture.start()])
        text += f"(?P={name})" if name in seen else rf"(?P<{name}>[^.]+)"
        seen.add(name)
        position = capture.end()
    unknown = sorted(set(_CAPTURE.findall(target)) - seen)
    if unknown:
        raise ConfigError(
            "the new name uses what the pattern does not capture",
            where=where,
            found=", ".join(f"{{{name}}}" for name in unknown),
            expected=f"a capture of {source}",
        )
    try:
        pattern = re.compile(text + re.escape(source[position:]) + r"(?=\.|$)")
    except re.error as error:
        raise ConfigError("not a pattern", where=where, found=source, expected="{name} captures") from error
    return Rename(source=source, target=target, pattern=pattern)


def renamed(run: Run, mappings: Iterable[Mapping], side: Side) -> tuple[Run, list[str]]:
    """Return a run with the names that the other run has, and notes on patterns that fitted nothing.

    Args:
        run: the run of ``side``.
        mappings: those that speak of it, applied in order.
        side: for messages.

    Raises:
        ConfigError: two names of the run become one.
    """
    notes: list[str] = []
    for mapping in mappings:
        fqns = _names(run)
        used: Counter[str] = Counter()
        table: dict[str, str] = {}
        for fqn in fqns:
            table[fqn], rename = mapping.rename(fqn)
            used[rename.source if rename else ""] += 1
        _require_injective(mapping, table, side)
        notes += [
            f"{mapping.where}: `{rename.source}` fits no name of the {side.value}"
            for rename in mapping.names
            if not used[rename.source]
        ]
        run = _with_names(run, table, mapping)
    return run, notes


def own_names(run: Run, mappings: Iterable[Mapping]) -> dict[str, str]:
    """Return a run's own names by those that ``renamed`` gives them; without those that stay.

    Args:
        run: as it was recorded.
        mappings: those that speak of it, in the order in which they are applied.
    """
    given = {fqn: fqn for fqn in _names(run)}
    for mapping in mappings:
        given = {own: mapping.rename(name)[0] for own, name in given.items()}
    return {name: own for own, name in given.items() if name != own}


def _names(run: Run) -> list[str]:
    found = {record.key.fqn: None for rank in run.ranks.values() for record in rank.records}
    return list({**found, **{p.fqn: None for rank in run.ranks.values() for p in rank.parameters}})


def _require_injective(mapping: Mapping, table: dict[str, str], side: Side) -> None:
    owner: dict[str, str] = {}
    for source, target in table.items():
        if target in owner:
            raise ConfigError(
                f"two names of the {side.value} become one",
                where=mapping.where,
                found=f"{owner[target]} and {source} both as {target}",
                expected="a name of its own for each",
            )
        owner[target] = source


def _with_names(run: Run, table: dict[str, str], mapping: Mapping) -> Run:
    ranks = {}
    for number, rank in run.ranks.items():
        kept = [p for p in rank.parameters if not _drops(mapping, table[p.fqn])]
        ranks[number] = replace(
            rank,
            records=tuple(
                replace(record, key=replace(record.key, fqn=table[record.key.fqn])) for record in rank.records
            ),
            parameters=tuple(
                replace(p, fqn=table[p.fqn], tied_to=table.get(p.tied_to, p.tied_to)) for p in kept
            ),
        )
    return replace(run, ranks=ranks)


def _drops(mapping: Mapping, fqn: str) -> bool:
    return any(drop.drops_parameter(fqn) for drop in mapping.drop)
