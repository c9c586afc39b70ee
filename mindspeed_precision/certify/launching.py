"""What a certificate is made from: a launch twice; or whole, until a checkpoint, and from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.determinism.environment import ENVIRONMENT
from mindspeed_precision.determinism.progress import Deadline
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches import read_launch

DEBUG = "precision-debug"
_MARK = "--precision-debug-certify-mark"
_NOT_RESUMED = ("no_load_optim", "no_load_rng", "finetune", "no_save_optim", "no_save_rng")
"""Arguments under which a run is no resume of the one before."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of the launch.

    Attributes:
        name: of its directory and its log.
        words: the command.
        environment: with which it is started.
        out: the run directory that it writes.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    out: Path


class Launching:
    """Builds the commands of a certificate from one launch.

    Args:
        words: the launch, as it is started by hand.
        out: where runs, checkpoints and logs go.
        environment: with which it would be started.

    Raises:
        ConfigError: it cannot be read, its processes are on several machines, or nothing can be added to it.
    """

    def __init__(self, words: Sequence[str], *, out: Path, environment: Mapping[str, str]) -> None:
        self.out = out
        self._launch = read_launch(words, environment)
        self._environment = {**environment, **_set_at_start(environment)}
        if self._launch.options.get("nnodes", "1") not in ("1", "1:1"):
            raise ConfigError(
                "this launch starts on several machines",
                where="certify",
                found=f"--nnodes {self._launch.options['nnodes']}",
                remedy="start it twice by hand with --precision-debug, then: certify RUN RUN2",
            )
        self._command = self._as_given(list(words))

    def twice(self, steps: int | None) -> list[PlannedRun]:
        """Return the same launch twice; until ``steps`` steps were made, where they are given.

        Raises:
            ConfigError: ``steps`` is no number of steps.
        """
        if steps is not None and steps < 1:
            raise ConfigError("no number of steps", where="--steps", found=str(steps), expected="at least 1")
        return [self._run(name, steps=steps) for name in ("first", "second")]

    def resumed(self, at: int, steps: int | None) -> list[PlannedRun]:
        """Return the whole launch, its first ``at`` steps with a checkpoint behind, and the rest from there.

        Args:
            at: the step that the resumed run begins with.
            steps: how many the whole run makes; None: twice as many.
        """
        total = 2 * at if steps is None else steps
        if not 0 < at < total:
            raise ConfigError(
                "there is nothing to resume",
                where="--resume-at",
                found=str(at),
                expected=f"from 1 to {total - 1}",
            )
        lost = [one for one in _NOT_RESUMED if self._launch.arguments.on(one)]
        if lost:
            raise ConfigError(
                "a run with this launch's arguments does not resume",
                where="--resume-at",
                found=", ".join(f"--{one.replace('_', '-')}" for one in lost),
                remedy="leave them out of the launch that is certified",
            )
        checkpoint = str(self.out / "checkpoint")
        until = {"save": [checkpoint], "save-interval": [str(at)], "exit-interval": [str(at)]}
        return [
            self._run("full", steps=total),
            self._run("first", steps=None, more=until),
            self._run("resumed", steps=total, more={"load": [checkpoint], "exit-on-missing-checkpoint": []}),
        ]

    def _run(
        self, name: str, *, steps: int | None, more: Mapping[str, Sequence[str]] | None = None
    ) -> PlannedRun:
        out = self.out / name
        added = {DEBUG: [], f"{DEBUG}-out": [str(out)], **self._settings(steps)}
        if self._launch.arguments.has("save"):  # a checkpoint of a user must not be overwritten
            added["save"] = [str(self.out / f"checkpoint-{name}")]
        words = self._command + [
            word for flag, values in {**added, **(more or {})}.items() for word in (f"--{flag}", *values)
        ]
        return PlannedRun(name=name, words=tuple(words), environment=self._environment, out=out)

    def _settings(self, steps: int | None) -> dict[str, Sequence[str]]:
        """Return what stops a run after so many steps, beside the settings that the launch has already."""
        if steps is None:
            return {}
        given = self._launch.arguments.last("precision_debug_set")
        kept = [one for one in (given.values if given else ()) if not one.startswith("stop_after=")]
        return {f"{DEBUG}-set": [*kept, f"stop_after={steps - 1}"]}

    def _as_given(self, words: list[str]) -> list[str]:
        """Return the command to which arguments are added: a script that hands them on, or what it starts."""
        if self._launch.source == "the command line":
            return words
        if _MARK in read_launch([*words, _MARK], self._environment).words():
            return ["bash", *words] if words[0].endswith(".sh") else words
        unknown = [word for word in self._launch.words() if "$" in word]
        if unknown or self._launch.sourced:
            raise ConfigError(
                "arguments cannot be added to this script",
                where=words[-1] if words[0] == "bash" else words[0],
                found=", ".join(unknown[:3]) or f"it sources {self._launch.sourced[0]}",
                expected='a command that ends with "$@"',
                remedy='add "$@" behind the arguments of the training script, or give the command itself',
            )
        self._environment = {**self._environment, **self._launch.environment}
        return self._launch.words()


def _set_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that no run can set for itself."""
    return {
        row.name: row.value
        for row in ENVIRONMENT
        if row.until is Deadline.INTERPRETER_START and not row.accepts(environment.get(row.name))
    }


__all__ = ["Launching", "PlannedRun"]
