"""Train unobserved, then observed, on every rank; print per rank whether all bits are the same.

Arguments: the run directory, then the trainer's settings as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

STEPS = 2


def parameters(trainer):
    return {name: value.detach().clone() for name, value in trainer.named_parameters().items()}


def main(out: Path, settings: TrainerSettings) -> None:
    with CpuTrainer(settings) as trainer:
        plain, before = trainer.train(STEPS), parameters(trainer)
    seen = {}

    def keep(trainer):
        seen["trainer"] = trainer

    observed = record_training(settings, out, steps=STEPS, plant=keep)
    after = {name: value.detach() for name, value in parameters(seen["trainer"]).items()}
    different = [name for name, value in before.items() if not torch.equal(value, after[name])]
    answer = {"results": plain == observed, "parameters": different, "count": len(before)}
    rank = torch.distributed.get_rank()
    (out.parent / f"answer{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), TrainerSettings(**json.loads(sys.argv[2])))
