"""What a case is: a bug, planted; its healthy twin; what a perfect tool answers. No framework is imported."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_precision.patching.declare import Called, Effect, PatchDeclaration

STEP = 2
"""Microbatches of a step, over all data-parallel ranks, unless a case says otherwise."""


def plant(
    target: str,
    wrapper: Callable[..., Any],
    signature: str | tuple[str, ...],
    why: str,
    *,
    opaque: bool = False,
) -> PatchDeclaration:
    """Declare what a bug changes in Megatron, as the tool's own patches are declared.

    Args:
        target: ``module:Class.method``.
        wrapper: a function of a case's module, ``(wrapped, instance, args, kwargs)``.
        signature: parameter list of the target.
        why: what the historical code did.
        opaque: the target shows no signature of its own.
    """
    return PatchDeclaration(
        name=f"{wrapper.__module__.rpartition('.')[2]}.{wrapper.__name__}@{target}",
        group="silentbench",
        file=wrapper.__module__,
        target=target,
        wrapper=f"{wrapper.__module__}:{wrapper.__name__}",
        signatures=(signature,) if isinstance(signature, str) else signature,
        effect=Effect.CONSTRAIN,
        why=why,
        opaque=opaque,
        called=Called.MAYBE,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """One recorded training; equal ones are recorded once, whichever cases they belong to.

    Attributes:
        settings: of ``testing.trainer.TrainerSettings``.
        world: processes.
        steps: training steps.
        patches: what is changed in Megatron.
        record: settings of the recording, beside the level.
        start: a training whose initial parameters this one begins with: another layout draws others.
        raises: what the training ends with, where the bug (or Megatron's own check) ends it.
        repeat: tells apart trainings that are otherwise equal.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    steps: int = 2
    patches: tuple[PatchDeclaration, ...] = ()
    record: tuple[str, ...] = ()
    start: Training | None = None
    raises: str = ""
    repeat: int = 0

    @property
    def name(self) -> str:
        """A directory name: equal for equal trainings."""
        text = json.dumps([asdict(self), *map(_source, self._modules)], sort_keys=True, default=str)
        words = [f"w{self.world}", *(f"{key}-{value}" for key, value in sorted(self.settings.items()))]
        plain = "".join(c if c.isalnum() or c in "-_." else "" for c in "_".join(words))[:60]
        return f"{plain}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @property
    def _modules(self) -> list[str]:
        begun = self.start._modules if self.start is not None else []
        return sorted({*begun, *(patch.file for patch in self.patches)})

    def but(self, *, settings: Mapping[str, Any] | None = None, **changes: Any) -> Training:
        """Return the same training with other settings, or with other attributes."""
        merged = {**self.settings, **(settings or {})}
        return replace(self, settings=merged, **changes)


@cache
def _source(module: str) -> str:
    """Return what a module plants, without what it says of it: another plant is another training."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    kept = (ast.FunctionDef, ast.ClassDef)
    return "\n".join(ast.dump(node) for node in tree.body if isinstance(node, kept))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a perfect tool answers, by one or several of its commands.

    Attributes:
        by: the commands: ``compare``, ``check``, ``verify``.
        step: first faulty step; -1 for before the first.
        phases: where in that step; any of them.
        fqn: shell patterns of the place; any of them.
        ids: shell patterns of the finding that names the cause; any of them.
        roles: of the record, where only some are right.
        ranks: on which it is seen, where the bug is not on all.
        says: words that the finding must say.
    """

    by: tuple[str, ...]
    step: int
    phases: tuple[str, ...]
    fqn: tuple[str, ...]
    ids: tuple[str, ...]
    roles: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    says: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One bug of the list (``bugs.yaml``).

    Attributes:
        id: in the list.
        sources: where it was met.
        faulty: the training with the bug.
        twin: the same without it; empty: ``faulty`` without its patches.
        reference: a healthy run to compare with; empty: another recording of the twin.
        twin_reference: what the twin is compared with, where that is another run than for the fault.
        answers: what a perfect tool says of it; none for a trap, of which nothing may be said.
        quick: it is in the tests that always run.
    """

    id: str
    sources: tuple[str, ...]
    faulty: Training
    twin: Training
    reference: Training
    twin_reference: Training
    answers: tuple[Answer, ...] = ()
    quick: bool = False

    @property
    def trainings(self) -> tuple[Training, ...]:
        """What must be recorded, what others begin with first."""
        mine = (self.reference, self.twin_reference, self.twin, self.faulty)
        starts = tuple(training.start for training in mine if training.start is not None)
        return _distinct((*starts, *mine))


def _distinct(trainings: tuple[Training, ...]) -> tuple[Training, ...]:
    return tuple({training.name: training for training in trainings}.values())


def case(
    id_: str,
    *sources: str,
    healthy: Training,
    patches: tuple[PatchDeclaration, ...] = (),
    faulty: Training | None = None,
    reference: Training | None = None,
    twin_reference: Training | None = None,
    answers: tuple[Answer, ...] = (),
    quick: bool = False,
) -> Case:
    """Put a case together: the bug is ``patches`` in a healthy training, or another training.

    Args:
        id_: in the list.
        sources: addresses.
        healthy: the twin.
        patches: the bug, on top of what is changed already.
        faulty: the training with the bug, where patches alone do not make it.
        reference: what to compare with, in another layout: the others then begin with its parameters.
        twin_reference: the same for the twin, where it needs another one.
        answers: what a perfect tool says.
        quick: it is in the tests that always run.
    """
    bad = faulty or healthy
    bad = bad.but(patches=(*bad.patches, *patches))
    if reference is None:
        reference, twin = healthy, healthy.but(repeat=1)
    else:
        bad = bad.but(start=reference)
        twin = healthy.but(start=twin_reference or reference)
    return Case(
        id=id_,
        sources=sources,
        faulty=bad,
        twin=twin,
        reference=reference,
        twin_reference=twin_reference or reference,
        answers=answers,
        quick=quick,
    )
