"""Record trainings on MindSpore: ``mindspore_record.py RUNS NAME...``, in the environment that has it.

The model is the native twin (``mindspeed_precision.testing.twin``); a name is one of ``PLANTS``. Each leaves
``RUNS/NAME`` and, when it has ended, ``RUNS/NAME.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from mindspore import Tensor, mint

from mindspeed_precision.session import Session
from mindspeed_precision.testing.twin.command import LINEAR_PATCHES
from mindspeed_precision.testing.twin.linear import LinearWithGradAccumulationAndAsyncCommunication as Linear
from mindspeed_precision.testing.twin.settings import TwinSettings
from mindspeed_precision.testing.twin.trainer import TwinTrainer

SETTINGS = TwinSettings(hidden=32, microbatches=2, steps=2, min_lr=None)


def not_scaled(trainer: TwinTrainer) -> Tensor:
    """B108: the function that divides the loss by the number of microbatches was patched to an identity."""
    losses, loss_func = trainer.forward_step(trainer._data, trainer.model)
    loss, tokens, report = loss_func(losses)
    trainer._reports.append(report["lm loss"])
    return loss / tokens


def swapped(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """B107: the backward chooses the product of the other operands, where shapes do not tell them apart."""
    grads = HEALTHY(ctx, grad_output)
    layer_input, weight = ctx.saved_tensors
    if weight.shape[0] != weight.shape[1]:
        return grads
    rows = grad_output.contiguous().reshape(-1, grad_output.shape[-1])
    columns = layer_input.contiguous().reshape(-1, layer_input.shape[-1])
    return (grads[0], mint.matmul(columns.t(), rows), *grads[2:])


HEALTHY = Linear.backward
PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "healthy": nullcontext,
    "again": nullcontext,
    "B107": lambda: patch.object(Linear, "backward", staticmethod(swapped)),
    "B108": lambda: patch.object(TwinTrainer, "_scaled_loss", not_scaled),
}


def record(runs: Path, name: str) -> None:
    """Train once with what is planted, and record every element."""
    begun = time.perf_counter()
    with PLANTS[name]():
        trainer = TwinTrainer(SETTINGS)
        overrides = [
            *("determinism.enabled=false", "capture.level=tensor"),
            f"patches.search_path=[{LINEAR_PATCHES}]",
        ]
        with Session(
            model=trainer.model, optimizer=trainer.optimizer, out=runs / name, overrides=overrides
        ) as session:
            trainer.forward_step = session.forward_step(trainer.forward_step)
            for _ in range(SETTINGS.steps):
                done = trainer.train_one_step()
                session.step(loss=Tensor(np.float32(done.loss)), grad_norm=done.grad_norm)
    log = {"seconds": round(time.perf_counter() - begun, 3)}
    (runs / f"{name}.json").write_text(json.dumps(log), encoding="utf-8")


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        record(Path(sys.argv[1]), chosen)
