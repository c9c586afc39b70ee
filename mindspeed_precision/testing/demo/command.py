"""``mindspeed-precision demo``: real trainings on this machine, told as they happen."""

from __future__ import annotations

import datetime
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import ConfigError, PrecisionError

_PACKAGE = "mindspeed_precision.testing.demo"


@dataclass(frozen=True)
class Entry:
    """A case of the demo.

    Attributes:
        module: where it is told.
        function: takes a directory and returns whether the case showed its point.
        about: what it shows, in one line.
    """

    module: str
    function: str
    about: str


_AT_START, _OVER_TIME = f"{_PACKAGE}.cases_at_start", f"{_PACKAGE}.cases_over_time"
_MINDSPORE = f"{_PACKAGE}.mindspore_story"
CASES = {
    "glm4": Entry(f"{_PACKAGE}.glm4_story", "tell", "dW that depends on the layout of a GEMM's operand"),
    "config": Entry(_AT_START, "config", "an argument given twice: preflight, verify"),
    "data-order": Entry(_AT_START, "data_order", "the same samples shuffled: verify"),
    "structure": Entry(_AT_START, "structure", "a norm with another epsilon: compare, verify, check"),
    "nondeterminism": Entry(_OVER_TIME, "nondeterminism", "one training, twice: certify"),
    "first-loss": Entry(_AT_START, "first_loss", "converted weights in another order: compare, verify"),
    "drift": Entry(_OVER_TIME, "drift", "curves that part late: reference= (teacher forcing)"),
    "nan": Entry(_OVER_TIME, "nan", "an overflow of float16 inside a kernel: check, compare"),
    "mindspore": Entry(_MINDSPORE, "tell", "every case of MindSpore on this CPU: the four that follow"),
    "mindspore-healthy": Entry(_MINDSPORE, "tell_healthy", "PyTorch and MindSpore agree within tolerance"),
    "mindspore-accumulate": Entry(_MINDSPORE, "tell_accumulate", "accumulation that ignores strides"),
    "mindspore-split": Entry(_MINDSPORE, "tell_split", "the backward of a split that ignores strides"),
    "mindspore-optimizer": Entry(_MINDSPORE, "tell_optimizer", "an optimizer that moves nothing"),
}
"""Every case, by the name that the command takes."""


def listing() -> str:
    """Return one line for each case."""
    widest = max(map(len, CASES))
    return "".join(f"{name:{widest}}  {entry.about}\n" for name, entry in CASES.items())


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What a demo came to.

    Attributes:
        status: 0 when it showed what it is about (the cause named and proved, the remedy verified); else 1.
        directory: where runs, logs and reports are.
    """

    status: int
    directory: Path

    def verdicts(self) -> dict[str, Any]:
        """Return every ``verdict.json`` and ``answer.json`` that was written, by its place."""
        found = sorted(
            file for name in ("verdict", "answer") for file in self.directory.glob(f"*/*/{name}.json")
        )
        return {str(path.parent.relative_to(self.directory)): json.loads(path.read_text()) for path in found}


def run(case: str, *, out: str | Path | None = None) -> DemoResult:
    """Run a case and tell what it shows.

    Args:
        case: name of the case, one of ``CASES``.
        out: directory for runs, logs and reports; a new one under ``runs/`` when None.

    Raises:
        ConfigError: there is no such case.
        PrecisionError: ``out`` is not empty, or this machine cannot show the case.
        ExternalCommandError: a training failed.
    """
    if case not in CASES:
        raise ConfigError("no such case", where="demo", found=case, expected=" or ".join(CASES))
    directory = _directory(case, out)
    entry = CASES[case]
    shown = getattr(importlib.import_module(entry.module), entry.function)(directory)
    return DemoResult(status=0 if shown else 1, directory=directory)


def _directory(case: str, out: str | Path | None) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = Path(out) if out else Path("runs") / f"demo-{case}-{stamp}"
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PrecisionError(
            "not an empty directory",
            where=str(directory),
            remedy="give a new one with --out; nothing was lost",
        )
    return directory
