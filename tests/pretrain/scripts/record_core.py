"""Record two steps of the core trainer on whichever megatron-core is on the path."""

from __future__ import annotations

import sys
from pathlib import Path

from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings

record_training(TrainerSettings(), Path(sys.argv[1]))
