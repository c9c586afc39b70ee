"""One recorded training of the CPU trainer, with room for a plant: what tests of a detector are made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mindspeed_precision.session import Session
from mindspeed_precision.testing.trainer import CpuTrainer, StepResult, TrainerSettings

Plant = Callable[[CpuTrainer], None]
UNPINNED = ("determinism.enabled=false",)
"""The trainer seeds itself, and a test process was not started with PYTHONHASHSEED."""


def record_training(
    settings: TrainerSettings,
    out: Path,
    *,
    steps: int = 2,
    plant: Plant | None = None,
    config: Path | None = None,
    overrides: Sequence[str] = (),
) -> list[StepResult]:
    """Train ``steps`` steps, or until ``stop_after``, and record them in the run directory ``out``.

    Args:
        settings: the model and how it is trained.
        out: the run directory to write.
        steps: number of steps.
        plant: called with the trainer before it is observed: puts a fault in, or its healthy twin.
        config: settings of the session, a YAML file.
        overrides: further settings, ``key=value``.

    Returns:
        Loss and grad norm of each step.
    """
    with ExitStack() as stack:
        trainer = stack.enter_context(CpuTrainer(settings))
        if plant is not None:
            plant(trainer)
        session = stack.enter_context(
            Session(
                model=trainer.model,
                optimizer=trainer.optimizer,
                out=out,
                config=config,
                overrides=[*UNPINNED, *overrides],
            )
        )
        trainer.forward_step = session.forward_step(trainer.forward_step)
        results = []
        for _ in range(steps):
            results.append(trainer.train_one_step())
            session.step(loss=results[-1].loss)
            if session.finished:
                break
        return results
