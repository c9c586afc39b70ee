"""Record several trainings in the same processes: ``record.py RUNS NAME...``, started by torchrun.

Each leaves ``RUNS/NAME`` and, when it has ended as it should, ``RUNS/NAME.json`` with what it logged.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist

from mindspeed_precision.patching.session import PatchSession
from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings
from silentbench.case import Training
from silentbench.trainings import LEVEL, known


def record(runs: Path, training: Training) -> None:
    """Train once with what is planted, and record it."""
    overrides = [*LEVEL, *training.record]
    if training.start is not None:
        overrides.append(f"init_from={runs / training.start.name}")
    steps, ended, begun = [], "", time.perf_counter()
    try:
        with PatchSession(training.patches, allow_external=True):
            steps = record_training(
                TrainerSettings(**training.settings),
                runs / training.name,
                steps=training.steps,
                overrides=overrides,
            )
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
        if not training.raises or training.raises not in ended:
            raise
    if not training.raises or ended:
        seconds = round(time.perf_counter() - begun, 3)
        log = {"steps": [asdict(step) for step in steps], "ended": ended, "seconds": seconds}
        (runs / f"{training.name}.json").write_text(json.dumps(log), encoding="utf-8")


if __name__ == "__main__":
    runs, trainings = Path(sys.argv[1]), known()
    for name in sys.argv[2:]:
        record(runs, trainings[name])
        if dist.is_initialized():
            dist.barrier()
