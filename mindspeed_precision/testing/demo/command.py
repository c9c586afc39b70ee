"""``mindspeed-precision demo``: real trainings on this machine, told as they happen."""

from __future__ import annotations

import datetime
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import ConfigError, PrecisionError
from mindspeed_precision.records import Diagnosis, Phase, Verdict
from mindspeed_precision.report.console import show
from mindspeed_precision.testing.demo.glm4 import REMEDY, STEPS, Arithmetic, Glm4, RunSpec, probe
from mindspeed_precision.testing.demo.launch import SCRIPT, CompletedRun

CASES = ("glm4",)
PRINTED = 1e-5
"""What the log's digits can hide of a loss."""
LAYOUTS = {1: "one process", 2: "two processes, tensor-parallel"}

BASELINE = RunSpec(name="baseline", other=True)
CANDIDATE = RunSpec(name="candidate", other=False)
REPAIRED = RunSpec(
    name="candidate-with-remedy",
    other=False,
    flags=("--precision-debug-set", f"remedies=[{REMEDY}]"),
)


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What a demo came to.

    Attributes:
        status: 0 when the first divergence is a dW, proved by replay, and the remedy makes the runs
            identical; else 1.
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
        case: name of the case; ``glm4``.
        out: directory for runs, logs and reports; a new one under ``runs/`` when None.

    Raises:
        ConfigError: there is no such case.
        PrecisionError: ``out`` is not empty, or this machine cannot show the case.
        ExternalCommandError: a training failed.
    """
    if case not in CASES:
        raise ConfigError("no such case", where="demo", found=case, expected=" or ".join(CASES))
    directory = _directory(case, out)
    arithmetic = probe()
    if arithmetic is None:
        raise PrecisionError(
            "this CPU multiplies a transposed view and its copy to the same bits in every arithmetic that "
            "was tried, so it cannot show this case",
            where="demo glm4",
        )
    _say(_introduction(arithmetic, directory))
    shown = [_show_layout(processes, arithmetic, directory) for processes in LAYOUTS]
    return DemoResult(status=0 if all(shown) else 1, directory=directory)


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


def _introduction(arithmetic: Arithmetic, directory: Path) -> str:
    return (
        "The GLM4 case: two runs of one Megatron GPT, equal but for one line in its linears' backward.\n"
        "  baseline    dW = grad_output.t().contiguous() @ input   (as the MindSpore side computes it)\n"
        "  candidate   dW = grad_output.t() @ input                (Megatron as it is)\n"
        f"  script      {SCRIPT.name}, {STEPS} steps of 1280 tokens\n"
        f"  this CPU    {arithmetic.describe()}\n"
        f"  files       {directory}\n"
    )


def _show_layout(processes: int, arithmetic: Arithmetic, directory: Path) -> bool:
    """Run the case at one tensor-parallel size; tell whether it showed what it is about."""
    case = Glm4(processes=processes, arithmetic=arithmetic, out=directory / f"tp{processes}")
    _say(f"\n━━ {LAYOUTS[processes]} ━━\n")
    baseline, candidate = _timed("training baseline and candidate", case, BASELINE, CANDIDATE)
    _say("\nWhat the two logs print:\n")
    _say(log_table(baseline, candidate))

    first, files = case.compare(BASELINE.name, CANDIDATE.name, report="first-pass")
    _say(_log_note(baseline, first))
    if "window" not in files:
        _say("\nThe runs do not diverge on this CPU with real data: nothing to show.")
        return False
    window = ("--precision-debug-config", files["window"])
    _say("\nThey diverge. Once more, keeping the elements of the divergent window, to prove the cause:\n")
    again = [
        RunSpec(name=f"{spec.name}-window", other=spec.other, flags=window) for spec in (BASELINE, CANDIDATE)
    ]
    _timed("training both again", case, *again)
    diagnosis, files = case.compare(again[0].name, again[1].name, report="compare")
    _say("")
    show(diagnosis, files)

    _say("\nThe candidate once more, with the remedy:\n")
    _timed(f"training with remedies=[{REMEDY}]", case, REPAIRED)
    repaired, files = case.compare(BASELINE.name, REPAIRED.name, report="compare-with-remedy")
    _say("")
    show(repaired, files)
    return _is_the_case(diagnosis) and repaired.status is Verdict.IDENTICAL


def _is_the_case(diagnosis: Diagnosis) -> bool:
    first = diagnosis.first_divergence
    proved = any(f.id == "wgrad.operand_layout" and f.proved_by_replay for f in diagnosis.findings)
    return first is not None and first.key.phase is Phase.WGRAD and proved


def log_table(baseline: CompletedRun, candidate: CompletedRun) -> str:
    """Return loss and grad norm of two runs as their logs print them, differences marked."""
    lines = ["  step   loss baseline   loss candidate   grad norm baseline   grad norm candidate"]
    for one, two in zip(baseline.rows, candidate.rows, strict=True):
        marks = [
            name
            for name, a, b in (("loss", one.loss, two.loss), ("norm", one.grad_norm, two.grad_norm))
            if a != b
        ]
        mark = f"   ← {' and '.join(marks)}" if marks else ""
        lines.append(
            f"  {one.iteration - 1:4d}   {one.loss:>13}   {two.loss:>14}   {one.grad_norm:>18}   "
            f"{two.grad_norm:>19}{mark}"
        )
    return "\n".join(lines)


def _log_note(run: CompletedRun, diagnosis: Diagnosis) -> str:
    """Say so where the second line of the log is the mean of two steps, as Megatron prints it since 0.16."""
    if len(run.rows) < 2 or len(diagnosis.scalars) < 2:
        return ""
    first, second = (row.baseline_loss for row in diagnosis.scalars[:2])
    printed = float(run.rows[1].loss)
    if first is None or second is None or abs(printed - second) < PRINTED:
        return ""
    if abs(printed - (first + second) / 2) > PRINTED:
        return ""
    return "  (the second loss that this Megatron prints is the mean of steps 0 and 1)"


def _timed(what: str, case: Glm4, *specs: RunSpec) -> list[CompletedRun]:
    sys.stdout.write(f"  {what} … ")
    sys.stdout.flush()
    start = time.monotonic()
    done = case.train(specs)
    _say(f"{time.monotonic() - start:.0f} s")
    return done


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
