"""Run the demo's training script, with an error planted in our code on rank 1, in its second step."""

from __future__ import annotations

import os
import runpy
import sys

from mindspeed_precision.capture import loop
from mindspeed_precision.testing.demo.launch import SCRIPT

observe, seen = loop.observe_step_losses, []


def broken(*args):
    seen.append(args)
    if len(seen) > 1 and os.environ["RANK"] == "1":
        raise LookupError("planted in the loop")
    return observe(*args)


loop.observe_step_losses = broken
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT), run_name="__main__")
