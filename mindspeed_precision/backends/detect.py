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

TORCH, TORCH_ON_MINDSPORE, MINDSPORE = "torch", "torch on mindspore", "mindspore"

_CAPTURE = {
    TORCH: ("mindspeed_precision.backends.torch_capture", "TorchCapture"),
    TORCH_ON_MINDSPORE: ("mindspeed_precision.backends.mindspore_torch", "MindSporeTorchCapture"),
    MINDSPORE: ("mindspeed_precision.backends.mindspore_native", "MindSporeCapture"),
}


def loaded_framework() -> str | None:
    """Return ``TORCH``, ``TORCH_ON_MINDSPORE`` or ``MINDSPORE``, by what this process has loaded; or None.

    ``torch`` is MindSpore underneath when its tensors are MindSpore's.
    """
    torch, mindspore = sys.modules.get("torch"), sys.modules.get("mindspore")
    if torch is not None:
        native = getattr(mindspore, "Tensor", None)
        tensor = getattr(torch, "Tensor", None)
        shim = isinstance(native, type) and isinstance(tensor, type) and issubclass(tensor, native)
        return TORCH_ON_MINDSPORE if shim else TORCH
    return None if mindspore is None else MINDSPORE


def framework() -> str:
    """Return what `loaded_framework` found.

    Raises:
        PrecisionError: no framework is loaded.
    """
    found = loaded_framework()
    if found is None:
        raise PrecisionError(
            "no framework is loaded in this process",
            expected="torch or mindspore",
            remedy="import the framework and build the model before the Session begins",
        )
    return found


def capture_backend() -> CaptureBackend:
    """Return the backend for the framework of this process.

    Raises:
        PrecisionError: no framework is loaded.
    """
    module, name = _CAPTURE[framework()]
    return cast(CaptureBackend, getattr(importlib.import_module(module), name)())
