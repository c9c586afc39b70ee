"""What happens in a worked case: something is said, trained, shown, or asked of the tool."""

from __future__ import annotations

import io
import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_precision.testing.demo.answers import differences
from mindspeed_precision.testing.demo.launch import SCRIPT
from mindspeed_precision.testing.demo.telling import log_table, say, timed

if TYPE_CHECKING:
    from mindspeed_precision.testing.demo.case import Stage

DEFECTS = Path(__file__).parent / "defects"
REPORTS = "reports"
WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training, as its user starts it.

    Attributes:
        name: of its run directory and its log.
        arguments: behind those that all trainings of the case have; of one given twice the last counts.
        kernels: scripts of ``defects/`` in front of the user's script, each with its variant.
        flags: settings of the recording, behind ``--precision-debug-out``; ``@NAME`` is the directory of a
            run.
        recorded: whether this tool is on at all.
    """

    name: str
    arguments: tuple[str, ...] = ()
    kernels: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    recorded: bool = True

    def script(self) -> list[str]:
        """Return the scripts in the order in which they start each other."""
        kernels = [word for name, variant in self.kernels for word in (str(DEFECTS / name), variant)]
        return [*kernels, str(SCRIPT)]


class Act(Protocol):
    """Something that happens in a case."""

    def play(self, stage: Stage) -> None:
        """Do it, and tell it."""


@dataclass(frozen=True)
class Say:
    """Something that is said.

    Attributes:
        text: one paragraph.
    """

    text: str

    def play(self, stage: Stage) -> None:
        """Say it."""
        say("\n" + textwrap.fill(self.text, WIDTH))


class Train:
    """Trainings, one after the other.

    Args:
        trainings: what is trained.
    """

    def __init__(self, *trainings: Training) -> None:
        self.trainings = trainings

    def play(self, stage: Stage) -> None:
        """Start each, and say by which command a user would."""
        say("")
        for training in self.trainings:
            debug = stage.recording(training)
            shown = [*(Path(word).name for word in training.script()), "$ARGS", *training.arguments, *debug]
            words = [*training.script(), *stage.case.arguments_of(training), *debug]
            stage.runs[training.name] = timed(
                f"$ launch/cpu.sh {shlex.join(shown).replace(chr(39), '')}\n   ",
                lambda words=words, training=training: stage.trainings.run(  # type: ignore[misc]
                    words, log=stage.directory / f"{training.name}.log"
                ),
            )


@dataclass(frozen=True, kw_only=True)
class Logs:
    """The table of two logs: what a user sees first.

    Attributes:
        baseline: name of a training.
        candidate: name of another.
        above: relative difference of a loss below which it is not marked: healthy kernels that round
            otherwise.
        every: which steps are shown.
    """

    baseline: str = "baseline"
    candidate: str = "candidate"
    above: float = 0.0
    every: int = 1

    def play(self, stage: Stage) -> None:
        """Show it."""
        say(f"\nWhat the logs of {self.baseline} and {self.candidate} print:\n")
        two = stage.runs[self.baseline], stage.runs[self.candidate]
        names = (self.baseline, self.candidate)
        say(log_table(*two, names=names, above=self.above, every=self.every))
        if not stage.told_of_the_mean:
            say("  (from 0.16 on Megatron prints the mean of steps 0 and 1 as the second loss)")
            stage.told_of_the_mean = True
        if self.above:
            say(f"  (marked is what differs by more than {self.above * 100:g} %)")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A command of the tool, and what it is documented to answer.

    Attributes:
        command: its words; ``@NAME`` is the directory of a run, ``@launch:NAME`` the launch of a training.
        answer: of its JSON, what must be so (``answers.differences``).
        status: its exit status.
        name: of its report; the first word where it is empty.
    """

    command: str
    answer: Mapping[str, Any]
    status: int
    name: str = ""

    def play(self, stage: Stage) -> None:
        """Run it, show what it says, and hold its JSON against the documented answer."""
        words = [filled for word in self.command.split() for filled in stage.filled(word)]
        name = self.name or words[0]
        out = stage.directory / REPORTS / name
        if words[0] in ("compare", "certify"):
            words += ["--out", str(out)]
        say(f"\n$ mindspeed-precision {_shown(words)}\n")
        status, text = _command(words)
        out.mkdir(parents=True, exist_ok=True)
        (out / "answer.txt").write_text(text, encoding="utf-8")
        say(_findings_alone(text, out))
        found = _json(words, out)
        wrong = [f"{name}: {one}" for one in differences(self.answer, found)]
        if status != self.status:
            wrong.append(f"{name}: exit status {status}, documented is {self.status}")
        stage.wrong += wrong


def _shown(words: Sequence[str]) -> str:
    """Return a command as one line; the arguments of a launch are in ``arguments.txt``, and not shown."""
    if "--" not in words:
        return shlex.join(words)
    script = max(number for number, word in enumerate(words) if word.endswith(".py"))
    return f"{shlex.join([*words[:script], Path(words[script]).name])} …"


_LOOKED_AT = re.compile(r"^  (versions|groups|parameters|checked|skipped) ", re.MULTILINE)
"""Where the findings of a command end, and what was looked at begins."""


def _findings_alone(text: str, out: Path) -> str:
    """Return what a command found; of what it looked at only where it is kept."""
    cut = _LOOKED_AT.search(text)
    if cut is None:
        return text.rstrip()
    left = text[cut.start() :].rstrip().count("\n") + 1
    return f"{text[: cut.start()].rstrip()}\n  … {left} more lines, what was looked at: {out / 'answer.txt'}"


def _command(words: list[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit status and what it prints, errors included."""
    from mindspeed_precision.cli import main

    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        status = main(words)
    return status, text.getvalue()


def _json(words: list[str], out: Path) -> Any:
    """Return what a command answers to machines, and keep it in ``out``."""
    if words[0] == "compare":  # it wrote it already
        return json.loads((out / "verdict.json").read_text(encoding="utf-8"))
    from mindspeed_precision.cli import main

    at = words.index("--") if "--" in words else len(words)
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(io.StringIO()):  # what stderr says was said once already
        main([*words[:at], "--json", *words[at:]])
    (out / "answer.json").write_text(text.getvalue(), encoding="utf-8")
    return json.loads(text.getvalue())


__all__ = ["REPORTS", "Act", "Ask", "Logs", "Say", "Train", "Training"]
