"""Trainings of the MindSpore cases: one script on two frameworks, and a twin in MindSpore's own cells.

Everything is small and in float32, since MindSpore's CPU kernels know no bfloat16. Every record keeps its
elements: between frameworks each tensor differs by rounding, which has to be told from a permutation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.flow import compare_in_full
from mindspeed_precision.records import Diagnosis
from mindspeed_precision.report.files import publish
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import (
    SCRIPT,
    CompletedRun,
    run_on_mindspore,
    run_training,
    run_twin,
)

STEPS = 3
MICROBATCHES = 2
MEGATRON = "0.12.1"
TRANSPOSED_WGRAD = Path(__file__).with_name("transposed_wgrad.py")
TWIN_MAPPING = Path(__file__).parents[1] / "twin" / "megatron.mapping.yaml"
PYTHON = "MSP_MINDSPORE_PYTHON"
NATIVE_PYTHON = "MSP_MINDSPORE_NATIVE_PYTHON"


class Framework(str, Enum):
    """What a training computes with."""

    TORCH = "torch"
    MINDSPORE = "MindSpore through mindtorch"
    TWIN = "MindSpore native"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training of a case.

    Attributes:
        name: of its run directory and log.
        framework: what computes.
        transposed_wgrad: the linears return dW as a transposed view, the same bits.
        remedies: names of remedies.
        options: further arguments, of the script or of the twin.
    """

    name: str
    framework: Framework
    transposed_wgrad: bool = False
    remedies: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


class Trainings:
    """The trainings of one case, in one directory.

    Args:
        out: where runs, logs and reports go.
        processes: tensor-parallel size and number of processes.
    """

    def __init__(self, out: Path, *, processes: int = 1) -> None:
        self.out = out
        self.processes = processes
        self._native: set[str] = set()

    def train(self, *trainings: Training) -> list[CompletedRun]:
        """Train; two side by side where every run has one process.

        Raises:
            PrecisionError: an environment is missing.
            ExternalCommandError: a training failed.
        """
        with ThreadPoolExecutor(2 if self.processes == 1 else 1) as pool:
            return list(pool.map(self._train_one, trainings))

    def compare(self, baseline: str, candidate: str, *, report: str) -> tuple[Diagnosis, dict[str, str]]:
        """Compare two runs by name; return the diagnosis and what was written about it."""
        across = len(self._native & {baseline, candidate}) == 1
        compared = compare_in_full(
            self.out / baseline, self.out / candidate, mapping=[TWIN_MAPPING] if across else []
        )
        return publish(compared.diagnosis, self.out / report, runs=compared.runs, mappings=compared.mappings)

    def _train_one(self, training: Training) -> CompletedRun:
        log = self.out / f"{training.name}.log"
        debug = self._debug(training)
        if training.framework is Framework.TWIN:
            self._native.add(training.name)
            arguments = [*_twin_arguments(), *training.options, *debug]
            return run_twin(arguments, python=interpreter(NATIVE_PYTHON), log=log)
        scripts = [TRANSPOSED_WGRAD, SCRIPT] if training.transposed_wgrad else [SCRIPT]
        arguments = [
            *map(str, scripts[1:]),
            *self._arguments(),
            *training.options,
            "--precision-debug",
            *debug,
        ]
        if training.framework is Framework.MINDSPORE:
            return run_on_mindspore(
                scripts[0], arguments, python=interpreter(PYTHON), processes=self.processes, log=log
            )
        return run_training(scripts[0], arguments, processes=self.processes, megatron=megatron(), log=log)

    def _arguments(self) -> Sequence[str]:
        return demo_arguments(
            tp=self.processes,
            dropout=0.0,
            iterations=STEPS,
            micro_batch_size=2,
            global_batch_size=2 * MICROBATCHES,
        )

    def _debug(self, training: Training) -> Sequence[str]:
        settings = ["capture.level=tensor"]
        if training.remedies:
            settings.append(f"remedies=[{','.join(training.remedies)}]")
        return ["--precision-debug-out", str(self.out / training.name), "--precision-debug-set", *settings]


def _twin_arguments() -> Sequence[str]:
    return ["--steps", str(STEPS), "--microbatches", str(MICROBATCHES)]


def interpreter(variable: str) -> Path:
    """Return the Python of a MindSpore environment, which ``variable`` names.

    Raises:
        PrecisionError: it is not there, or MindSpore does not fit this machine.
    """
    named = os.environ.get(variable, "")
    python = Path(named)
    unavailable = python.parent.parent / ".unavailable"
    if named and unavailable.is_file():
        raise PrecisionError(unavailable.read_text(encoding="utf-8").strip(), where=variable)
    if not named or not python.is_file():
        raise PrecisionError(
            "no environment with MindSpore",
            where=variable,
            found=named or "nothing",
            expected="the path of its python",
            remedy="`make demo-mindspore` builds it and names it",
        )
    return python


def megatron() -> Path | None:
    """Return where megatron-core 0.12.1 lies for torch; None: what is importable anyway.

    Raises:
        PrecisionError: ``MSP_MCORE`` names a directory that does not hold it.
    """
    trees = os.environ.get("MSP_MCORE")
    if not trees:
        return None
    directory = Path(trees) / MEGATRON
    if not (directory / "megatron" / "core").is_dir():
        raise PrecisionError(
            f"no megatron-core {MEGATRON}",
            where="MSP_MCORE",
            found=str(directory),
            expected="a directory with the package megatron",
            remedy="`make demo-mindspore` installs it and names it",
        )
    return directory
