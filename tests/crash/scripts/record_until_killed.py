"""Record three steps on every rank; the rank that is named kills itself inside the backward of a step.

Arguments: the run directory, the rank to kill (-1 for none), the step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings

victim, fatal_step = int(sys.argv[2]), int(sys.argv[3])


def plant(trainer):
    parameter = trainer.named_parameters()["decoder.final_layernorm.weight"]
    seen = {"backwards": 0}

    def kill(grad):
        seen["backwards"] += 1
        if seen["backwards"] > fatal_step * trainer.settings.microbatches:
            os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        parameter.register_hook(kill)


record_training(TrainerSettings(), Path(sys.argv[1]), steps=3, plant=plant)
