"""MindSpore on a CPU under a torch API: MindSpore CPU through mindtorch; not MSAdapter, not Ascend.

mindnlp 0.5.1 brings ``mindtorch``, which answers ``import torch`` with MindSpore, as MSAdapter does on
Ascend. ``install()`` imports it and mends what stands between it and an unmodified ``megatron.core`` 0.12.1
on MindSpore 2.7.1: every change is a declared ``CompatPiece`` in ``PIECES`` that says what it changes, why,
and whose shortcoming it makes up for: mindtorch's, MindSpore's on a CPU, or what Megatron asks of a device
that is not there. docs/megatron-on-mindspore-cpu.md lists them. It cannot do bf16 arithmetic, sequence
parallelism, or send and receive. This is for tests and the demo; a user's MSAdapter needs none of it.

``python -m mindspeed_precision.testing.mindtorch SCRIPT ARGS...`` runs a script that knows nothing of it.
Nothing here imports MindSpore before ``install()`` is called.
"""

from __future__ import annotations

from mindspeed_precision.testing.mindtorch.piece import CompatPiece, Mends
from mindspeed_precision.testing.mindtorch.registry import LABEL, PIECES, install, installed_pieces

__all__ = ["LABEL", "PIECES", "CompatPiece", "Mends", "install", "installed_pieces"]
