"""Run a training script behind real MindSpeed: users begin theirs with ``import mindspeed.megatron_adaptor``.

Arguments: the script, and its own arguments. The CPU layer is in place already.
"""

from __future__ import annotations

import runpy
import sys

from mindspeed_precision.testing import torch_npu_stand_in

torch_npu_stand_in.install()

import mindspeed.megatron_adaptor  # noqa: E402, F401 - patches Megatron, by the arguments on the command line

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
