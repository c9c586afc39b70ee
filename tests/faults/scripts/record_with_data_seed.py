"""Record two steps on two data-parallel ranks; rank 1 reads its data in the order of the seed that is given.

Arguments: the run directory, the trainer's settings as JSON, the seed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings

options = json.loads(sys.argv[2])
if os.environ["RANK"] == "1":
    options["data_seed"] = int(sys.argv[3])
record_training(TrainerSettings(**options), Path(sys.argv[1]))
