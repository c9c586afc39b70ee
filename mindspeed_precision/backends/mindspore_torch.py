"""What observers need of a ``torch`` that is MindSpore underneath: MSAdapter, or mindnlp's mindtorch.

Modules and optimizers are torch's own text there, tensors and autograd are MindSpore's. Nothing of what torch
keeps in C++ exists: no function modes, no graph task ids.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.distributed_c10d  # a shim imports it when asked to, and patches want it loaded

from mindspeed_precision.backends.mindspore_capture import MindSporeTape
from mindspeed_precision.backends.torch_api import TorchApi


class MindSporeTorchCapture(MindSporeTape, TorchApi):
    """Implements ``backends.capture_base.CaptureBackend`` for torch's API on MindSpore."""

    patch_groups = ("mindspore", "mindspore_torch")

    def detach(self, tensor: Any) -> Any:
        """Return a view without autograd."""
        return tensor.detach()

    def version_text(self) -> str:
        """Return MindSpore's version, and that of the torch that stands on it."""
        return f"{super().version_text()} (torch API {torch.__version__})"
