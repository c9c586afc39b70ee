"""What ``mindspeed-precision patches list|check|explain`` tells, as plain rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.patching.declare import Called, PatchDeclaration, load_declarations, select
from mindspeed_precision.patching.resolve import Outcome, resolve

_CALLED = {
    Called.START: "before the first step at the latest, else training is stopped",
    Called.STEP: "by the end of the first step at the latest, else training is stopped",
    Called.MAYBE: "if the configuration needs it",
}


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """What one declaration finds on this machine, or in given source trees.

    Attributes:
        outcome: ``ok``, ``absent``, ``version excluded``, ``signature differs``, ``wrapper unusable`` or, of
            given trees, ``not in the trees``.
        reason: one sentence, empty when ok.
        refused: whether a run that uses the patch would be refused.
    """

    name: str
    group: str
    target: str
    outcome: Outcome
    reason: str
    refused: bool


def list_rows(search_path: Sequence[str | Path] = ()) -> list[PatchDeclaration]:
    """Return every declaration; nothing of it is imported.

    Raises:
        ConfigError: see ``load_declarations``.
    """
    return list(load_declarations(search_path))


def check_rows(search_path: Sequence[str | Path] = (), *, allow_external: bool = False) -> list[CheckRow]:
    """Resolve every declaration on this machine: imports the targets, changes nothing.

    What a run patches only if its program has imported it is imported, too, after all others: a check has a
    process of its own.

    Raises:
        ConfigError: see ``load_declarations``.
    """
    declarations = load_declarations(search_path)
    gentle_first = sorted(declarations, key=lambda declaration: declaration.if_loaded)
    rows = {declaration.name: _check(declaration, allow_external) for declaration in gentle_first}
    return [rows[declaration.name] for declaration in declarations]


def explain(name: str, search_path: Sequence[str | Path] = (), *, allow_external: bool = False) -> str:
    """Return what the patch ``name`` does, why, and what it finds on this machine.

    Raises:
        ConfigError: no patch has this name; see also ``load_declarations``.
    """
    (declaration,) = select(load_declarations(search_path), names=[name])
    row = _check(declaration, allow_external)
    lines = [
        f"{declaration.name} (patches/{declaration.file}, effect {declaration.effect.value})",
        f"  why       {' '.join(declaration.why.split())}",
        f"  target    {declaration.target}",
        f"  wrapper   {declaration.wrapper}",
        *(f"  written for {signature}" for signature in declaration.signatures),
        f"  requires  {', '.join(declaration.requires) or 'nothing'}",
        f"  called    {_CALLED[declaration.called]}",
    ]
    flags = {
        "an absent target is fine": declaration.optional,
        "left out unless the program has imported the module": declaration.if_loaded,
        "the target may be wrapped by others already": declaration.opaque,
        f"one call of any patch of '{declaration.any_of}' will do": bool(declaration.any_of),
    }
    lines += [f"  note      {text}" for text, holds in flags.items() if holds]
    return "\n".join([*lines, f"  here      {row.outcome.value}{': ' + row.reason if row.reason else ''}"])


def _check(declaration: PatchDeclaration, allow_external: bool) -> CheckRow:
    if declaration.if_loaded:
        declaration = dataclasses.replace(declaration, if_loaded=False, optional=True)
    resolution = resolve(declaration, allow_external=allow_external)
    return CheckRow(
        name=declaration.name,
        group=declaration.group,
        target=declaration.target,
        outcome=resolution.outcome,
        reason=resolution.reason,
        refused=resolution.refused,
    )
