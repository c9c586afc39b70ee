"""Run a training script behind real MindSpeed, or MindSpeed-LLM, whose adaptor its users import first.

Arguments: the script, and its own arguments. The CPU layer is in place already.
"""

from __future__ import annotations

import os
import runpy
import sys

from mindspeed_precision.testing import torch_npu_stand_in

torch_npu_stand_in.install()

if os.environ.get("MSP_MINDSPEED_LLM"):
    from mindspeed_llm import megatron_adaptor  # noqa: F401 - MindSpeed's patches and its own
else:
    import mindspeed.megatron_adaptor  # noqa: F401 - patches Megatron, by the arguments on the command line

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
