"""Text for ``mindspeed-precision patches list`` and ``patches check``."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_precision.patching.declare import PatchDeclaration
from mindspeed_precision.patching.explain import CheckRow
from mindspeed_precision.patching.resolve import Outcome


def list_text(declarations: Sequence[PatchDeclaration]) -> str:
    """Return one line per declaration: group, name, effect, target; and its reason below."""
    lines = []
    for declaration in declarations:
        lines.append(
            f"{declaration.group}/{declaration.name}  [{declaration.effect.value}]  {declaration.target}"
        )
        lines.append(f"    {' '.join(declaration.why.split())}")
    return "\n".join(lines)


def check_text(rows: Sequence[CheckRow], *, place: str = "here") -> str:
    """Return one line per declaration: what it finds, and a last line that sums up; ``place`` says where."""
    width = max((len(row.outcome.value) for row in rows), default=0)
    names = max((len(f"{row.group}/{row.name}") for row in rows), default=0)
    lines = [
        f"{'!' if row.refused else ' '} {row.outcome.value:{width}}  {f'{row.group}/{row.name}':{names}}  "
        f"{row.reason or row.target}"
        for row in rows
    ]
    refused = sum(row.refused for row in rows)
    unseen = sum(row.outcome is Outcome.ELSEWHERE for row in rows)
    verdict = f"{refused} of {len(rows)} patches cannot be used {place} (!)"
    if not refused:
        verdict = f"every patch is fine {place}"
    if unseen:
        verdict += f"; {unseen} are of packages that are not there, and were not checked"
    return "\n".join([*lines, verdict])
