"""The GLM4 case, made again on this machine: two trainings that differ in the layout of one GEMM operand.

The baseline computes dW as the MindSpore side does (``other_backend``), the candidate is Megatron as it is.
Everything else is equal. What is said about them is read from what they wrote, never known beforehand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.flow import compare_in_full
from mindspeed_precision.records import Diagnosis
from mindspeed_precision.report.files import publish
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import SCRIPT, CompletedRun, run_training

HERE = Path(__file__).parent
OTHER_BACKEND = HERE / "other_backend.py"
PLAIN_KERNELS = HERE / "plain_kernels.py"
REMEDY = "wgrad_contiguous_operands"
SEED = 2
"""With it the logs show the case as its team saw it: the norm differs a step before the loss does."""
STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What the probe found.

    Attributes:
        dtype: ``bf16`` or ``fp16``.
        onednn: whether oneDNN computes the products.
        differing: elements of dW that depend on the operand's layout, by shape of dW.
    """

    dtype: str
    onednn: bool
    differing: dict[str, int]

    def describe(self) -> str:
        """Return it as one phrase."""
        shapes = ", ".join(
            f"{count} elements of a {shape} dW" for shape, count in self.differing.items() if count
        )
        return f"{self.dtype}{'' if self.onednn else ' without oneDNN'}: {shapes} depend on the layout"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training of the case.

    Attributes:
        name: of its run directory and log.
        other: computed by the other backend.
        flags: further arguments.
    """

    name: str
    other: bool
    flags: tuple[str, ...] = ()


def probe() -> Arithmetic | None:
    """Return the first arithmetic in which this CPU shows the layout, or None where none does.

    Raises:
        ExternalCommandError: torch is missing or fails.
    """
    command = [sys.executable, "-m", "mindspeed_precision.testing.demo.probe"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise ExternalCommandError(
            "the demo could not multiply two matrices",
            where="probe",
            found=(done.stderr.strip().splitlines() or ["nothing"])[-1],
            remedy='install the demo\'s extra: pip install "mindspeed-precision[demo]", or `make demo`',
        )
    found = json.loads(done.stdout)
    return None if found is None else Arithmetic(**found)


class Glm4:
    """The case at one tensor-parallel size.

    Args:
        processes: tensor-parallel size and number of processes.
        arithmetic: what the probe found.
        out: where its runs, logs and reports go.
    """

    def __init__(self, *, processes: int, arithmetic: Arithmetic, out: Path) -> None:
        self.processes = processes
        self.arithmetic = arithmetic
        self.out = out

    def train(self, specs: Sequence[RunSpec]) -> list[CompletedRun]:
        """Train; side by side where every run has one process."""
        workers = 2 if self.processes == 1 else 1
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(self._train_one, specs))

    def _train_one(self, spec: RunSpec) -> CompletedRun:
        arguments = demo_arguments(
            tp=self.processes,
            dtype=self.arithmetic.dtype,
            seq_length=1280,
            micro_batch_size=1,
            global_batch_size=1,
            dropout=0.0,
            iterations=STEPS,
            seed=SEED,
        )
        scripts = [SCRIPT]
        if spec.other:
            scripts.insert(0, OTHER_BACKEND)
        if not self.arithmetic.onednn:
            scripts.insert(0, PLAIN_KERNELS)
        debug = [
            "--precision-debug",
            "--precision-debug-out",
            str(self.run_directory(spec.name)),
            *spec.flags,
        ]
        return run_training(
            scripts[0],
            [*map(str, scripts[1:]), *arguments, *debug],
            processes=self.processes,
            log=self.out / f"{spec.name}.log",
        )

    def run_directory(self, name: str) -> Path:
        """Return where the run ``name`` is recorded."""
        return self.out / name

    def compare(self, baseline: str, candidate: str, *, report: str) -> tuple[Diagnosis, dict[str, str]]:
        """Compare two runs by name; return the diagnosis and what was written about it."""
        compared = compare_in_full(self.run_directory(baseline), self.run_directory(candidate))
        return publish(compared.diagnosis, self.out / report, runs=compared.runs, mappings=compared.mappings)
