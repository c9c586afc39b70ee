"""The GLM4 case as it is told: train, show the logs, compare, prove, repair."""

from __future__ import annotations

from pathlib import Path

from mindspeed_precision.counting import count
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.records import Diagnosis, Phase, Verdict
from mindspeed_precision.report.console import show
from mindspeed_precision.report.phrases import byte_count
from mindspeed_precision.testing.demo.glm4 import REMEDY, STEPS, Arithmetic, Glm4, RunSpec, probe
from mindspeed_precision.testing.demo.launch import SCRIPT, CompletedRun
from mindspeed_precision.testing.demo.telling import log_table, say, timed

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


def tell(directory: Path) -> bool:
    """Run the case in ``directory``; tell whether it showed what it is about.

    Raises:
        PrecisionError: this machine cannot show the case.
        ExternalCommandError: a training failed.
    """
    arithmetic = probe()
    if arithmetic is None:
        raise PrecisionError(
            "this CPU multiplies a transposed view and its copy to the same bits in every arithmetic that "
            "was tried, so it cannot show this case",
            where="demo glm4",
        )
    say(_introduction(arithmetic, directory))
    shown = [_show_layout(processes, arithmetic, directory) for processes in LAYOUTS]
    return all(shown)


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
    say(f"\n━━ {LAYOUTS[processes]} ━━\n")
    baseline, candidate = timed("training baseline and candidate", lambda: case.train([BASELINE, CANDIDATE]))
    say("\nWhat the two logs print:\n")
    say(log_table(baseline, candidate))

    first, files = case.compare(BASELINE.name, CANDIDATE.name, report="first-pass")
    say(_log_note(baseline, first))
    if "refine" not in files:
        say("\nThe runs do not diverge on this CPU with real data: nothing to show.")
        return False
    refined = ("--precision-debug-config", files["refine"])
    say(f"\nThey diverge. Two short runs with the settings that `compare` wrote prove why:\n{_plan(first)}\n")
    again = [
        RunSpec(name=f"{spec.name}-refined", other=spec.other, flags=refined)
        for spec in (BASELINE, CANDIDATE)
    ]
    timed("training both again", lambda: case.train(again))
    diagnosis, files = case.compare(again[0].name, again[1].name, report="compare")
    say("")
    show(diagnosis, files)

    say("\nThe candidate once more, with the remedy:\n")
    timed(f"training with remedies=[{REMEDY}]", lambda: case.train([REPAIRED]))
    repaired, files = case.compare(BASELINE.name, REPAIRED.name, report="compare-with-remedy")
    say("")
    show(repaired, files)
    return _is_the_case(diagnosis) and repaired.status is Verdict.IDENTICAL


def _plan(diagnosis: Diagnosis) -> str:
    refinement = diagnosis.refinement
    assert refinement is not None
    return (
        f"  refine.yaml stops after step {refinement.stop_after} and keeps the elements of "
        f"{count(refinement.records, 'record')}, {byte_count(refinement.payload_bytes)} a run"
    )


def _is_the_case(diagnosis: Diagnosis) -> bool:
    first = diagnosis.first_divergence
    proved = any(f.id == "wgrad.operand_layout" and f.proved_by_replay for f in diagnosis.findings)
    return first is not None and first.key.phase is Phase.WGRAD and proved


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
