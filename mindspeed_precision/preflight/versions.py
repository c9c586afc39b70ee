"""Installed packages that do not go together: by ``configs/preflight/versions.yaml`` and their metadata."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.preflight.planned import PACKAGES, Planned, version_of
from mindspeed_precision.records import Finding, Severity
from mindspeed_precision.verify.registry import Answer


@dataclass
class _Pair:
    name: str = ""
    one: str = ""
    other: str = ""
    release: int = 3
    severity: str = "error"
    reason: str = ""
    source: str = ""


@dataclass
class _Together:
    name: str = ""
    packages: list[str] = field(default_factory=list)
    severity: str = "error"
    reason: str = ""
    source: str = ""


@dataclass
class _Schema:
    schema: int = 0
    pairs: list[_Pair] = field(default_factory=list)
    together: list[_Together] = field(default_factory=list)


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    path = data_directory("configs") / "preflight" / "versions.yaml"
    return read_document(path, _Schema, kind="table of versions", remedy="see docs/preflight.md")


def versions(planned: Planned) -> Answer:
    """Look for packages that do not go together."""
    found = planned.versions
    rows = [*_pairs(found), *_together(found), *_declared(found)]
    findings = tuple(finding for finding in rows if finding is not None)
    return Answer(
        exercised=len(rows), findings=findings, skipped="" if rows else "nothing of it is installed"
    )


def _pairs(found: Mapping[str, str]) -> Iterator[Finding | None]:
    """Yield, for each pair that is installed, what is wrong with it."""
    for pair in _table()["pairs"]:
        one, other = (version_of(found.get(pair[side], "")) for side in ("one", "other"))
        if one is None or other is None:
            continue
        length = pair["release"]
        agree = one.release[:length] == other.release[:length]
        yield None if agree else _finding(pair, (pair["one"], pair["other"]), found)


def _together(found: Mapping[str, str]) -> Iterator[Finding | None]:
    for row in _table()["together"]:
        wanted = [Requirement(text) for text in row["packages"]]
        if not all(one.name in found for one in wanted):
            continue
        all_hold = all(one.specifier.contains(found[one.name], prereleases=True) for one in wanted)
        yield _finding(row, [one.name for one in wanted], found) if all_hold else None


def _finding(row: Mapping[str, Any], names: Any, found: Mapping[str, str]) -> Finding:
    return Finding(
        id="env.versions_incompatible",
        severity=Severity(row["severity"]),
        confidence=0.9,
        title=f"{' and '.join(f'{name} {found[name]}' for name in names)} do not go together",
        evidence=(f"{row['reason']} ({row['name']}; {row['source']})",),
        remedy="install versions that belong together (docs/preflight.md)",
    )


def _declared(found: Mapping[str, str]) -> Iterator[Finding | None]:
    """Yield, for each requirement of one package on another of them, whether it is kept."""
    for name in PACKAGES:
        if name not in found:
            continue
        for requirement in _requirements(name, found[name]):
            version = found.get(requirement.name.lower().replace("_", "-"))
            if version is None:
                continue
            kept = requirement.specifier.contains(version, prereleases=True)
            yield (
                None
                if kept
                else Finding(
                    id="env.versions_incompatible",
                    severity=Severity.WARNING,
                    confidence=0.9,
                    title=f"{name} {found[name]} asks for {requirement}, and {version} is installed",
                    evidence=(f"the metadata of {name} {found[name]}",),
                    remedy=f'pip install "{requirement}"',
                )
            )


@lru_cache(maxsize=len(PACKAGES))
def _requirements(name: str, version: str) -> tuple[Requirement, ...]:
    """Return what an installed package asks for; ``version`` tells installations apart."""
    try:
        declared = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    found = [one for text in declared if (one := _requirement(text)) is not None]
    return tuple(one for one in found if one.marker is None or one.marker.evaluate({"extra": ""}))


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None
