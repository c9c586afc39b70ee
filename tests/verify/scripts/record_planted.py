"""Record two steps of a planted training. Arguments: run directory, settings as JSON, the plant."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from planting import FACTORIES

record_training(
    TrainerSettings(**json.loads(sys.argv[2])),
    Path(sys.argv[1]),
    plant=FACTORIES[sys.argv[3]],
    overrides=["capture.level=tensor", "capture.modules=false"],
)
