"""Short ways to say what a perfect tool answers; several words are alternatives."""

from __future__ import annotations

from silentbench.case import Answer

MODEL = "(model)"
"""The model itself, which has no name of its own."""


def by_compare(step: int, phases: str, fqn: str, ids: str, **more: str | tuple[int, ...]) -> Answer:
    """Say what ``compare`` answers (see ``answer``)."""
    return answer("compare", step, phases, fqn, ids, **more)


def by_check(step: int, phases: str, fqn: str, ids: str, **more: str | tuple[int, ...]) -> Answer:
    """Say what ``check`` answers (see ``answer``)."""
    return answer("check", step, phases, fqn, ids, **more)


def by_verify(ids: str, fqn: str = "*", *, step: int = -1, says: str = "") -> Answer:
    """Say what ``verify`` answers: before the first step, if nothing else is said."""
    return answer("verify", step, "init optimizer batch", fqn, ids, says=says)


def answer(
    by: str,
    step: int,
    phases: str,
    fqn: str,
    ids: str,
    *,
    roles: str = "",
    ranks: tuple[int, ...] = (),
    says: str = "",
) -> Answer:
    """Return an answer.

    Args:
        by: commands.
        step: first faulty step.
        phases: of that step.
        fqn: shell patterns.
        ids: shell patterns of findings.
        roles: of the record.
        ranks: on which it is seen.
        says: words of the finding, all of them.
    """
    return Answer(
        by=tuple(by.split()),
        step=step,
        phases=tuple(phases.split()),
        fqn=tuple("" if name == MODEL else name for name in fqn.split()),
        ids=tuple(ids.split()),
        roles=tuple(roles.split()),
        ranks=ranks,
        says=tuple(says.split()),
    )
