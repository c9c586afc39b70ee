"""Train a tiny GPT with capture on and print the resident memory, in KiB, after every step."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from mindspeed_precision.testing import cpu

cpu.install()

from mindspeed_precision.session import Session  # noqa: E402
from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings  # noqa: E402

PAGE = 4


def resident() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE


def main(out: str, steps: int, leak: bool) -> None:
    kept = []
    settings = TrainerSettings(layers=2, hidden=16, heads=2, seq_length=8, microbatches=1)
    overrides = ["determinism.enabled=false", "capture.rules=[{role: wgrad, level: tensor}]"]
    with (
        CpuTrainer(settings) as trainer,
        Session(model=trainer.model, optimizer=trainer.optimizer, out=out, overrides=overrides) as session,
    ):
        trainer.forward_step = session.forward_step(trainer.forward_step)
        for _ in range(steps):
            loss = trainer.train_one_step().loss
            if leak:
                kept.append(session.context.recorder._pending)
            session.step(loss=loss)
            gc.collect()
            sys.stdout.write(f"{resident()}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "leak")
