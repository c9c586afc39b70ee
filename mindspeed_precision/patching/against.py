"""Which declarations still fit source trees of Megatron-LM and MindSpeed; nothing of those is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.patching.declare import PatchDeclaration, load_declarations, parse_requirement
from mindspeed_precision.patching.explain import CheckRow
from mindspeed_precision.patching.resolve import OPAQUE, Outcome
from mindspeed_precision.patching.signatures import parameters_of
from mindspeed_precision.patching.source_tree import Found, SourceTrees

_SUGGESTIONS = 3


def check_against(trees: Sequence[str | Path], search_path: Sequence[str | Path] = ()) -> list[CheckRow]:
    """Look for the target of every declaration in ``trees``, by ``ast`` alone.

    What a decorator makes of a signature is not seen: it counts as it is written.

    Args:
        trees: directories that hold packages, as ``PYTHONPATH`` would name them.
        search_path: further directories of declarations.

    Returns:
        A row for each declaration. ``refused`` where a run would be, and for a group of which no declaration
        admits the version that is there.

    Raises:
        ConfigError: a tree is missing or not readable as Python, or none holds a package that is patched.
    """
    source = SourceTrees(trees)
    rows = [_row(source, declaration) for declaration in load_declarations(search_path)]
    if all(row.outcome is Outcome.ELSEWHERE for row in rows):
        found = sorted({entry.name for tree in trees for entry in Path(tree).iterdir() if entry.is_dir()})
        raise ConfigError(
            "no package that is patched is in these trees",
            where=", ".join(map(str, trees)),
            found=", ".join(found[:8]) or "no directory",
            expected="megatron/core, megatron/training, mindspeed …",
            remedy="name the directory that holds the package",
        )
    return _without_groups(rows)


def _without_groups(rows: list[CheckRow]) -> list[CheckRow]:
    """Refuse what is excluded by its version where nothing else of the group is left."""
    left = {row.group for row in rows if row.outcome is not Outcome.EXCLUDED}
    return [
        dataclasses.replace(
            row, refused=True, reason=f"{row.reason}; nothing of the group {row.group} is left"
        )
        if row.group not in left
        else row
        for row in rows
    ]


def _row(source: SourceTrees, declaration: PatchDeclaration) -> CheckRow:
    outcome, reason = _look(source, declaration)
    excluded = "" if outcome is Outcome.ELSEWHERE else _excluded(source, declaration)
    if excluded:
        reason = f"{excluded}; it {f'would not fit: {reason}' if reason else 'would fit'}"
        outcome = Outcome.EXCLUDED
    tolerated = outcome is Outcome.ABSENT and (declaration.optional or declaration.if_loaded)
    return CheckRow(
        name=declaration.name,
        group=declaration.group,
        target=declaration.target,
        outcome=outcome,
        reason=reason,
        refused=outcome is Outcome.SIGNATURE or (outcome is Outcome.ABSENT and not tolerated),
    )


def _look(source: SourceTrees, declaration: PatchDeclaration) -> tuple[Outcome, str]:
    if not source.holds_package_of(declaration.module):
        return Outcome.ELSEWHERE, f"{declaration.module} is in no package of these trees"
    found = source.find(declaration.module, declaration.qualname)
    if not found:
        there = source.holds(declaration.module)
        what = (
            f"{declaration.module} has no {declaration.qualname}"
            if there
            else f"no module {declaration.module}"
        )
        return Outcome.ABSENT, what + _suggestion(source, declaration)
    for one in found:
        if wrong := _misfit(declaration, one):
            return Outcome.SIGNATURE, wrong
    return Outcome.OK, ""


def _misfit(declaration: PatchDeclaration, found: Found) -> str:
    parameters = found.parameters
    line = getattr(found.node, "lineno", 0)
    if parameters is None:
        kind = type(found.node).__name__
        return "" if declaration.opaque else f"{found.address} is no function: {kind} in line {line}"
    if parameters in map(parameters_of, declaration.signatures):
        return ""
    if declaration.opaque and [name.count("*") for name in parameters] == OPAQUE:
        return ""
    declared = " or ".join(declaration.signatures)
    return f"declared for {declared}, found ({', '.join(parameters)}) in line {line} of {found.module}"


def _excluded(source: SourceTrees, declaration: PatchDeclaration) -> str:
    """Return which requirement the trees do not meet; a package that is not in them is not asked."""
    for text in declaration.requires:
        requirement = parse_requirement(text)
        if not source.holds_package_of(requirement.name):
            continue
        version = source.version(requirement.name)
        if not version or not requirement.specifier.contains(version, prereleases=True):
            return f"needs {text}, found {version or 'no version'}"
    return ""


def _suggestion(source: SourceTrees, declaration: PatchDeclaration) -> str:
    """Say where it may have gone: the same path in another module, or a like name here."""
    moved = [one.address for one in source.elsewhere(declaration.module, declaration.qualname)]
    beside = {one.qualname: one for one in source.beside(declaration.module, declaration.qualname)}
    fitting = [name for name, one in beside.items() if not _misfit(declaration, one)]
    close = get_close_matches(declaration.qualname, fitting, n=_SUGGESTIONS) or get_close_matches(
        declaration.qualname, list(beside), n=_SUGGESTIONS
    )
    if moved:
        return f"; moved to {' or '.join(moved[:_SUGGESTIONS])}?"
    return f"; renamed to {' or '.join(close)}?" if close else ""
