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
CASES = {
    "glm4": (f"{_PACKAGE}.glm4_story", "tell"),
    "mindspore": (f"{_PACKAGE}.mindspore_story", "tell"),
    "mindspore-healthy": (f"{_PACKAGE}.mindspore_story", "tell_healthy"),
    "mindspore-accumulate": (f"{_PACKAGE}.mindspore_story", "tell_accumulate"),
    "mindspore-split": (f"{_PACKAGE}.mindspore_story", "tell_split"),
    "mindspore-optimizer": (f"{_PACKAGE}.mindspore_story", "tell_optimizer"),
}
"""Where each case is told: a function of a directory, which returns whether the case showed its point."""


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
        """Return every ``verdict.json`` that was written, by its place in the directory."""
        found = sorted(self.directory.glob("*/*/verdict.json"))
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
    module, name = CASES[case]
    shown = getattr(importlib.import_module(module), name)(directory)
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
