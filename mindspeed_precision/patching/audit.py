"""Where an installed patch stands: seen, covered, or displaced by somebody who patched later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mindspeed_precision.patching.declare import Effect, PatchDeclaration
from mindspeed_precision.patching.lookup import describe, raw_attribute, reaches


class Status(str, Enum):
    """Where a patch stands."""

    OUTERMOST = "outermost"
    """Nothing foreign lies above it."""
    COVERED = "covered"
    """Somebody wrapped it and still calls it."""
    DISPLACED = "displaced"
    """Somebody replaced it: it sees nothing any more."""
    NOT_APPLICABLE = "not applicable"
    """Its declaration allows that it is left out here."""
    UNDONE = "undone"


@dataclass(frozen=True, kw_only=True)
class PatchAudit:
    """One line of an audit.

    Attributes:
        calls: how often the wrapper was called.
        problem: what is wrong; empty when nothing is.
        note: why it is not applicable, or what could not be undone.
    """

    name: str
    target: str
    effect: Effect
    status: Status
    calls: int
    problem: str = ""
    note: str = ""


@dataclass(kw_only=True, eq=False)
class Installation:
    """One patch in place.

    Attributes:
        parent: module or class that is patched.
        attribute: name in ``parent``.
        before: the raw descriptor that stood there.
        inherited: a class had ``before`` from a base; undo deletes.
        wrapper: what stands there now; None until it was set.
        aliases: module, its dictionary and the name of everything else that was replaced.
        calls: how often it was called.
        calls_at_check: ``calls`` when `PatchSession.require_healthy` was last asked.
        active: False once undone; a wrapper that somebody still calls then only passes through.
        note: why it could not be undone.
    """

    declaration: PatchDeclaration
    parent: Any
    attribute: str
    before: Any
    inherited: bool
    wrapper: Any = None
    aliases: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    calls: int = 0
    calls_at_check: int = 0
    active: bool = True
    note: str = ""

    def current(self) -> Any:
        """Return the raw descriptor that stands at the place now, None if somebody deleted it."""
        try:
            return raw_attribute(self.parent, self.attribute)[0]
        except KeyError:
            return None


def standing(installation: Installation, own: Collection[int]) -> tuple[Status, str]:
    """Tell where ``installation`` stands now, and what is wrong with that.

    What is not visibly wrapped is displaced, unless it was called since `PatchSession.require_healthy`: a
    wrapper that hides what it calls cannot be seen through.

    Args:
        installation: an installed patch.
        own: ``id`` of every wrapper of the same session; they may lie above.
    """
    top = current = installation.current()
    while id(current) in own and current is not installation.wrapper:
        current = current.__wrapped__
    lost = [
        f"{module}.{attribute}"
        for module, namespace, attribute in installation.aliases
        if not reaches(namespace.get(attribute), installation.wrapper)
    ]
    called = installation.calls > installation.calls_at_check
    if lost and not called:
        return (
            Status.DISPLACED,
            f"its alias {', '.join(lost)} was set again by somebody else after this patch",
        )
    if current is installation.wrapper:
        return Status.OUTERMOST, ""
    if called or reaches(top, installation.wrapper):
        return Status.COVERED, ""
    return Status.DISPLACED, f"was replaced by {describe(top)} after this patch"


def left_out(declaration: PatchDeclaration, reason: str) -> PatchAudit:
    """Return the audit's line of a patch that is not applicable here."""
    return PatchAudit(
        name=declaration.name,
        target=declaration.target,
        effect=declaration.effect,
        status=Status.NOT_APPLICABLE,
        calls=0,
        note=reason,
    )
