"""Train on the CPU trainer under real msprobe; run by its own interpreter, where msprobe is installed.

``python trained_with_msprobe.py OUT LEVEL TASK SUMMARY [--model JSON] [--steps N] [--scale-dw MODULE F]``
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Train, and leave msprobe's dump in ``OUT``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("level")
    parser.add_argument("task")
    parser.add_argument("summary")
    parser.add_argument("--model", default="{}")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--config", default="{}", help="JSON: more keys of msprobe's configuration")
    parser.add_argument("--scale-dw", nargs=2, metavar=("MODULE", "FACTOR"))
    options = parser.parse_args()
    from mindspeed_precision.testing import cpu

    cpu.install()  # before Megatron is imported, which msprobe does
    debugger = _debugger(options)
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    with CpuTrainer(TrainerSettings(**json.loads(options.model))) as trainer:
        if options.scale_dw:
            from msprobe_plants import scale_dw

            scale_dw(trainer, options.scale_dw[0], float(options.scale_dw[1]))
        for _ in range(options.steps):
            debugger.start(model=trainer.model[0] if len(trainer.model) == 1 else trainer.model)
            result = trainer.train_one_step()
            debugger.stop()
            debugger.step()
            sys.stdout.write(f"step {result.step} loss {result.loss!r} grad_norm {result.grad_norm!r}\n")


def _debugger(options: argparse.Namespace) -> Any:
    from msprobe.pytorch import PrecisionDebugger

    kept: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": options.summary}
    plain = {"task": options.task, "dump_path": str(options.out), "rank": [], "step": []}
    plain |= {"level": options.level, options.task: kept, **json.loads(options.config)}
    options.out.mkdir(mode=0o750, parents=True, exist_ok=True)
    config = options.out.with_name(f"{options.out.name}.config{os.environ.get('RANK', '')}.json")
    config.write_text(json.dumps(plain), encoding="utf-8")
    return PrecisionDebugger(config_path=str(config))


if __name__ == "__main__":
    main()
