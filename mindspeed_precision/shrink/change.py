"""What becomes of one argument, and why; and what is lost by it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Change:
    """One argument that becomes another.

    Attributes:
        name: without dashes.
        old: as it was; empty where it was not given.
        new: as it becomes; None: it is left out.
        reason: why this value.
    """

    name: str
    old: str
    new: str | None
    reason: str

    @property
    def line(self) -> str:
        """The change as a line for a person."""
        new = "left out" if self.new is None else self.new
        return f"--{self.name}: {self.old or 'not given'} -> {new} ({self.reason})"


@dataclass
class Changes:
    """Changes of one launch, collected in order.

    Attributes:
        made: each change; a later one of the same argument replaces an earlier one.
        lost: what the shrunk launch can no longer reproduce.
    """

    made: dict[str, Change] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def set(self, name: str, old: object, new: object, reason: str) -> None:
        """Note that ``name`` becomes ``new``; nothing where it is that already."""
        before = "" if old is None else str(old)
        if str(new) != before:
            self.made[name] = Change(name=name, old=before, new=str(new), reason=reason)

    def leave_out(self, name: str, old: object, reason: str) -> None:
        """Note that ``name`` is left out."""
        self.made[name] = Change(name=name, old="given" if old is True else str(old), new=None, reason=reason)
