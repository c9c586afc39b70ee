"""Which framework this process computes with: asked of what is loaded, never assumed.

On Ascend the same Megatron code runs on torch_npu or on MindSpore under MSAdapter, where ``import torch`` is
a shim; a native MindSpore program has no ``torch`` at all.
"""

from __future__ import annotations

import importlib
import sys
from typing import cast

from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.errors import PrecisionError

_CAPTURE = {
    "torch": ("mindspeed_precision.backends.torch_capture", "TorchCapture"),
    "torch on mindspore": ("mindspeed_precision.backends.mindspore_torch", "MindSporeTorchCapture"),
    "mindspore": ("mindspeed_precision.backends.mindspore_native", "MindSporeCapture"),
}


def framework() -> str:
    """Return ``torch``, ``torch on mindspore`` or ``mindspore``, by what this process has loaded.

    ``torch`` is MindSpore underneath when its tensors are MindSpore's.

    Raises:
        PrecisionError: neither is loaded.
    """
    torch, mindspore = sys.modules.get("torch"), sys.modules.get("mindspore")
    if torch is not None:
        native = getattr(mindspore, "Tensor", None)
        tensor = getattr(torch, "Tensor", None)
        shim = isinstance(native, type) and isinstance(tensor, type) and issubclass(tensor, native)
        return "torch on mindspore" if shim else "torch"
    if mindspore is not None:
        return "mindspore"
    raise PrecisionError(
        "no framework is loaded in this process",
        expected="torch or mindspore",
        remedy="import the framework and build the model before the Session begins",
    )


def capture_backend() -> CaptureBackend:
    """Return the backend for the framework of this process.

    Raises:
        PrecisionError: no framework is loaded.
    """
    module, name = _CAPTURE[framework()]
    return cast(CaptureBackend, getattr(importlib.import_module(module), name)())
