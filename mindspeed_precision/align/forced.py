"""Steps that both runs begin with one state, because one took it from the other (teacher forcing)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mindspeed_precision.align.state import RecordedStates
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import DumpError, IncomparableError


def forced_steps(baseline: Run, candidate: Run, steps: Iterable[int]) -> frozenset[int]:
    """Return the compared steps that both runs begin with the same state, loaded by one of them or by both.

    Args:
        baseline: a run.
        candidate: another.
        steps: those that are compared.

    Raises:
        IncomparableError: a step begins with a state that the other run did not have there: what it computes
            says nothing of the other.
        DumpError: a manifest is damaged.
    """
    loaded = [loaded_states(run) for run in (baseline, candidate)]
    forced = sorted({step for states in loaded for step in states} & set(steps))
    if not forced:
        return frozenset()
    own = [RecordedStates(run) for run in (baseline, candidate)]
    for step in forced:
        one, two = (
            known.get(step) or states.before(step).digest for known, states in zip(loaded, own, strict=True)
        )
        if one != two:
            taken = candidate if step in loaded[1] else baseline
            raise IncomparableError(
                f"step {step} of {taken.path} began with the state of another run",
                where=f"{baseline.path} and {candidate.path}",
                found=reference_of(taken),
                expected="the state that the other run had before that step",
                remedy="compare it with the run that was its reference",
            )
    return frozenset(forced)


def loaded_states(run: Run) -> Mapping[int, str]:
    """Return the steps of a run that began with the state of its reference, each with that state's digest.

    Raises:
        DumpError: the manifest is damaged.
    """
    reference = run.manifest.get("reference")
    if reference is None:
        return {}
    states = reference.get("states") if isinstance(reference, dict) else None
    if not isinstance(states, dict) or not all(str(step).isdigit() for step in states):
        raise DumpError(
            "not a list of loaded states", where=f"{run.path}: reference", found=repr(reference)[:80]
        )
    return {int(step): str(digest) for step, digest in states.items()}


def reference_of(run: Run) -> str:
    """Return the path of a run's reference as that run knew it; empty where it has none."""
    reference = run.manifest.get("reference")
    return str(reference.get("run", "")) if isinstance(reference, dict) else ""


def forced_note(baseline: Run, candidate: Run, forced: frozenset[int], numbers: str) -> str:
    """Say what was loaded; empty where nothing was."""
    if not forced:
        return ""
    takers = [
        f"the {side} took weights and optimizer state from {reference_of(run)}"
        for side, run in (("baseline", baseline), ("candidate", candidate))
        if loaded_states(run)
    ]
    plural = "s" if len(forced) > 1 else ""
    return (
        f"{' and '.join(takers)} before step{plural} {numbers}: "
        f"{'each of them is' if plural else 'it is'} compared as a first step, and nothing propagates into "
        f"{'one' if plural else 'it'}"
    )
