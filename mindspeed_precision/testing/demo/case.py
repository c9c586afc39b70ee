"""A worked case as data: trainings, tables that their user sees, commands that explain them, answers.

A case is told in the order of its acts. It has shown its point only if every command gave the documented
answer.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_precision.testing.demo.acts import Act, Ask, Train, Training
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.forked import ForkedTrainings
from mindspeed_precision.testing.demo.launch import CompletedRun
from mindspeed_precision.testing.demo.telling import say


@dataclass(kw_only=True)
class Stage:
    """Where a case is played.

    Attributes:
        case: what is played.
        directory: of its runs, logs and reports.
        trainings: what starts the trainings.
        runs: the trainings that ended, by name.
        wrong: what was not answered as documented.
        told_of_the_mean: whether the reader knows of Megatron's second line.
    """

    case: Case
    directory: Path
    trainings: ForkedTrainings
    runs: dict[str, CompletedRun] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    told_of_the_mean: bool = False

    def recording(self, training: Training) -> list[str]:
        """Return the arguments that record a training; none where it is not recorded."""
        if not training.recorded:
            return []
        flags = [filled for flag in training.flags for filled in self.filled(flag)]
        return ["--precision-debug", "--precision-debug-out", str(self.directory / training.name), *flags]

    def filled(self, word: str) -> list[str]:
        """Return a word of a command with ``@NAME`` as the directory of that run, ``@launch`` as a launch."""
        before, mark, name = word.partition("@")
        if not mark:
            return [word]
        if not before and name.startswith("launch:"):
            training = self.case.training(name.removeprefix("launch:"))
            return [
                "torchrun",
                "--nproc-per-node",
                "1",
                *training.script(),
                *self.case.arguments_of(training),
            ]
        return [f"{before}{self.directory / name}"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A worked case.

    Attributes:
        name: as ``demo`` takes it.
        title: what it is about, in one line.
        arguments: of ``demo_arguments``, for every training.
        extra: further arguments of every training, as Megatron takes them.
        acts: what happens.
    """

    name: str
    title: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    acts: tuple[Act, ...]

    def __call__(self, directory: Path, trainings: ForkedTrainings | None = None) -> bool:
        """Play the case in ``directory``; tell whether every command gave the documented answer.

        Args:
            directory: of its runs, logs and reports.
            trainings: what starts its trainings, for several cases; None: its own.

        Raises:
            ExternalCommandError: a training failed.
            PrecisionError: a command could not answer.
        """
        directory.mkdir(parents=True, exist_ok=True)
        arguments = directory / "arguments.txt"
        arguments.write_text(shlex.join(self._arguments()) + "\n", encoding="utf-8")
        say(f"{self.title}\n  files   {directory}\n  ARGS    in {arguments}")
        with ForkedTrainings() if trainings is None else nullcontext(trainings) as started:
            stage = Stage(case=self, directory=directory, trainings=started)
            for act in self.acts:
                act.play(stage)
        return self._close(stage.wrong)

    def _close(self, wrong: Sequence[str]) -> bool:
        asked = sum(isinstance(act, Ask) for act in self.acts)
        if not wrong:
            say(f"\nEach of the {asked} commands gave the answer that docs/cases.md documents.")
            return True
        say(f"\nNOT as docs/cases.md documents:\n{chr(10).join(f'  {line}' for line in wrong)}")
        return False

    def _arguments(self) -> list[str]:
        return demo_arguments(**{**SMALL, **self.arguments}, extra=self.extra)

    def arguments_of(self, training: Training) -> list[str]:
        """Return all of a training's arguments for Megatron."""
        return [*self._arguments(), *training.arguments]

    def training(self, name: str) -> Training:
        """Return a training of the case by its name."""
        played = [one for act in self.acts if isinstance(act, Train) for one in act.trainings]
        return next(one for one in played if one.name == name)


SMALL = {"dropout": 0.0, "iterations": 4, "micro_batch_size": 2, "global_batch_size": 4, "hidden": 32}
"""Of every case where it does not say otherwise: seconds on one core."""

__all__ = ["Case", "Stage"]
