"""The MindSpore cases as they are told: a healthy pair, and defects that MindSpore's CPU kernels really have.

Whether the installed MindSpore has a defect is measured first: a release that mends it makes the case say so.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.records import Diagnosis, Phase, Severity, Verdict
from mindspeed_precision.report.console import show
from mindspeed_precision.testing.demo.frameworks import (
    NATIVE_PYTHON,
    PYTHON,
    Framework,
    Training,
    Trainings,
    interpreter,
)
from mindspeed_precision.testing.demo.telling import log_table, say, timed

WHAT_IT_IS = (
    "MindSpore CPU through mindtorch (`import torch` that is MindSpore underneath), and in its own cells;\n"
    "  not MSAdapter, not Ascend; no bf16 compute, no sequence parallelism, no send/recv"
)
WORKING, IDLE = "experimental.adamw", "mint.adam"
"""Two optimizers of MindSpore: one moves parameters on a CPU, the other does not."""

ALIGNED = 0.99
"""Share of the records that must have a partner."""
_PROCESSES = {1: "one process", 2: "two processes, tensor-parallel"}


def tell(directory: Path) -> bool:
    """Tell every case; each in a directory of its own."""
    say(f"One GPT on two frameworks: PyTorch and MindSpore.\n  {WHAT_IT_IS}\n  files       {directory}\n")
    shown = [case(directory) for case in (tell_healthy, tell_accumulate, tell_split, tell_optimizer)]
    return all(shown)


def tell_healthy(directory: Path) -> bool:
    """Tell of a healthy pair: one script on torch and on MindSpore, and MindSpore twice."""
    shown = [_healthy(directory / f"healthy-tp{processes}", processes=processes) for processes in _PROCESSES]
    return all(shown)


def _healthy(out: Path, *, processes: int) -> bool:
    case = Trainings(out, processes=processes)
    say(f"\n━━ The same script on both, {_PROCESSES[processes]} ━━\n")
    torch = Training(name="torch", framework=Framework.TORCH)
    mindspore = Training(name="mindspore", framework=Framework.MINDSPORE)
    one, two = timed("training on torch and on MindSpore", lambda: case.train(torch, mindspore))
    say(log_table(one, two, mark=False))  # rounding differs anyway: the verdict judges
    across = _compared(case, torch, mindspore, report="compare")
    agree = across.status is Verdict.WITHIN_TOLERANCE and not _alarms(across) and _aligned(across)
    if processes > 1:
        return agree
    again = Training(name="mindspore-again", framework=Framework.MINDSPORE)
    timed("training on MindSpore once more", lambda: case.train(again))
    return agree and _compared(case, mindspore, again, report="compare-again").status is Verdict.IDENTICAL


def tell_accumulate(directory: Path) -> bool:
    """Tell of gradients that are added up without regard to strides (MindSpore CPU, 2.7.1 to 2.10.0)."""
    case = Trainings(directory / "accumulate")
    say("\n━━ dW as a transposed view: accumulation ━━\n")
    if not _has(PYTHON, "accumulation"):
        return True
    torch = Training(name="torch", framework=Framework.TORCH, transposed_wgrad=True)
    mindspore = Training(name="mindspore", framework=Framework.MINDSPORE, transposed_wgrad=True)
    one, two = timed("training on torch and on MindSpore", lambda: case.train(torch, mindspore))
    say(log_table(one, two, mark=False))  # rounding differs anyway: the verdict judges
    diagnosis = _compared(case, torch, mindspore, report="compare")
    repaired = Training(
        name="mindspore-with-remedy",
        framework=Framework.MINDSPORE,
        transposed_wgrad=True,
        remedies=("wgrad_contiguous",),
    )
    timed("training on MindSpore with remedies=[wgrad_contiguous]", lambda: case.train(repaired))
    cured = _compared(case, torch, repaired, report="compare-with-remedy")
    return _names(diagnosis, Phase.ACCUMULATE, "layout.noncontiguous_accumulate") and _healthy_again(cured)


def tell_split(directory: Path) -> bool:
    """Tell of ``mint.split``, whose backward ignores strides (MindSpore CPU, 2.8.0 to 2.10.0)."""
    case = Trainings(directory / "split")
    say("\n━━ The same model in MindSpore's own cells: mint.split ━━\n")
    if not _has(NATIVE_PYTHON, "split"):
        return True
    torch = Training(name="torch", framework=Framework.TORCH)
    chunk = Training(name="native-chunk", framework=Framework.TWIN, options=("--split", "chunk"))
    split = Training(name="native-split", framework=Framework.TWIN, options=("--split", "split"))
    one, two, _ = timed(
        "training on torch, natively with mint.split and with mint.chunk",
        lambda: case.train(torch, split, chunk),
    )
    say(log_table(one, two, mark=False))  # rounding differs anyway: the verdict judges
    healthy = _compared(case, torch, chunk, report="compare-chunk")
    diagnosis = _compared(case, torch, split, report="compare")
    repaired = Training(
        name="native-with-remedy",
        framework=Framework.TWIN,
        options=("--split", "split"),
        remedies=("split_by_slices",),
    )
    timed("training natively with remedies=[split_by_slices]", lambda: case.train(repaired))
    cured = _compared(case, torch, repaired, report="compare-with-remedy")
    return (
        _healthy_again(healthy)
        and _names(diagnosis, Phase.DGRAD, "layout.noncontiguous_grad")
        and _healthy_again(cured)
    )


def tell_optimizer(directory: Path) -> bool:
    """Tell of ``mint.optim``, which updates nothing on a CPU, and of MindSpore's AdamW that does."""
    case = Trainings(directory / "optimizer")
    say("\n━━ An optimizer that moves nothing: mint.optim ━━\n")
    if not _has(NATIVE_PYTHON, "mint_optimizer"):
        return True
    reference = Training(name="working", framework=Framework.TWIN, options=("--optimizer", WORKING))
    again = Training(name="working-again", framework=Framework.TWIN, options=("--optimizer", WORKING))
    idle = Training(name="idle", framework=Framework.TWIN, options=("--optimizer", IDLE))
    timed(
        f"training natively with {WORKING}, again, and with {IDLE}",
        lambda: case.train(reference, again, idle),
    )
    healthy = _compared(case, reference, again, report="compare-again")
    diagnosis = _compared(case, reference, idle, report="compare")
    found = [finding.id for finding in diagnosis.findings]
    return healthy.status is Verdict.IDENTICAL and "optimizer.parameters_unmoved" in found


def _compared(case: Trainings, one: Training, two: Training, *, report: str) -> Diagnosis:
    say(f"\n{one.name} against {two.name}:\n")
    diagnosis, files = case.compare(one.name, two.name, report=report)
    show(diagnosis, files)
    say("")
    return diagnosis


def _has(variable: str, defect: str) -> bool:
    """Measure whether the MindSpore of an environment has a defect, and say so."""
    measured = probes(variable)[defect]
    say(f"  {measured['line']}\n")
    return bool(measured["present"])


def probes(variable: str) -> dict[str, Any]:
    """Return what every probe of ``testing.twin.defects`` measured, by its name.

    Raises:
        ExternalCommandError: the interpreter that ``variable`` names cannot run them.
    """
    command = [str(interpreter(variable)), "-m", "mindspeed_precision.testing.twin", "--probe", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExternalCommandError(
            "the probes of MindSpore's kernels failed",
            where=variable,
            found=(done.stderr.strip().splitlines() or ["nothing"])[-1],
            remedy="`make demo-mindspore` builds the environment anew after `make clean`",
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _alarms(diagnosis: Diagnosis) -> list[str]:
    return [finding.id for finding in diagnosis.findings if finding.severity is not Severity.INFO]


def _aligned(diagnosis: Diagnosis) -> bool:
    coverage = diagnosis.coverage
    return coverage.matched >= ALIGNED * (coverage.matched + coverage.unmatched)


def _names(diagnosis: Diagnosis, phase: Phase, finding: str) -> bool:
    first = diagnosis.first_divergence
    proved = any(found.id == finding and found.proved_by_replay for found in diagnosis.findings)
    return first is not None and first.key.phase is phase and proved


def _healthy_again(diagnosis: Diagnosis) -> bool:
    return diagnosis.status is Verdict.WITHIN_TOLERANCE and not _alarms(diagnosis)
