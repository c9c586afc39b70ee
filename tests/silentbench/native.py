"""Bugs of the list on MindSpore itself: the native twin, the same bug planted, its healthy twin.

Skipped, and said so by name, where the environment with MindSpore is not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from silentbench.answers import MODEL, by_check, by_compare
from silentbench.case import Answer
from silentbench.score import COMMANDS, Score, mark

HERE = Path(__file__).parent
PYTHON = "MSP_MINDSPORE_NATIVE_PYTHON"
SECONDS = 600

_PROJECTION = "decoder.layers.*.self_attention.linear_proj*"
CASES: dict[str, tuple[Answer, ...]] = {
    "B107": (
        by_compare(0, "wgrad", _PROJECTION, "wgrad.operand_value wgrad.after_gemm wgrad.own_fault"),
        by_check(0, "wgrad", _PROJECTION, "wgrad.operand_not_received wgrad.changed_on_the_way"),
    ),
    "B108": (
        by_compare(0, "dgrad", f"{MODEL} output_layer", "dgrad.scaled loss.gradient_scaled"),
        by_check(0, "dgrad", MODEL, "loss.gradient_scaled"),
    ),
}
"""What a perfect tool says, by the id of the bug; planted by the same name in ``mindspore_record``."""


def interpreter() -> Path | None:
    """Return the interpreter of the environment with MindSpore; None: it is not there."""
    named = os.environ.get(PYTHON)
    python = Path(named) if named else HERE.parents[1] / ".venv-mindspore-native" / "bin" / "python"
    there = python.is_file() and not (python.parent.parent / ".unavailable").is_file()
    return python if there else None


def missing(runs: Path) -> list[str]:
    """Return what is not recorded yet."""
    return [name for name in ("healthy", "again", *CASES) if not (runs / f"{name}.json").is_file()]


def record(runs: Path, python: Path) -> None:
    """Record the trainings that are missing, in one process.

    Raises:
        subprocess.CalledProcessError: a training failed; its log is beside the runs.
    """
    wanted = missing(runs)
    if not wanted:
        return
    runs.mkdir(parents=True, exist_ok=True)
    paths = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    sys.stderr.write(f"recording on MindSpore: {' '.join(wanted)}\n")
    with (runs / "log").open("wb") as log:
        subprocess.run(
            [str(python), "-W", "ignore", str(HERE / "mindspore_record.py"), str(runs), *wanted],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=SECONDS,
        )


def score(id_: str, runs: Path) -> Score:
    """Ask every command of one bug on MindSpore."""
    begun = time.perf_counter()
    reference, twin, faulty = (runs / name for name in ("healthy", "again", id_))
    marks = {command: mark(CASES[id_], command, reference, faulty, reference, twin) for command in COMMANDS}
    asked = round(time.perf_counter() - begun, 1)
    logs = [json.loads((runs / f"{name}.json").read_text(encoding="utf-8")) for name in (id_, "again")]
    return Score(case=id_, marks=marks, trained=sum(log["seconds"] for log in logs), asked=asked)


def scores(runs: Path) -> tuple[list[Score], str]:
    """Record and score every bug on MindSpore.

    Returns:
        The scores, and why there are none; empty: there are.
    """
    python = interpreter()
    if python is None:
        named = os.environ.get(PYTHON, "no environment")
        return [], f"not run: {named} has no MindSpore (make mindspore installs it, {PYTHON} names another)"
    try:
        record(runs, python)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return [Score(case=id_, failure=f"{error}; see {runs / 'log'}") for id_ in CASES], ""
    return [score(id_, runs) for id_ in CASES], ""
