"""Megatron on a CPU: unmodified ``megatron.core`` and ``megatron.training`` over gloo, for tests.

``install()`` maps ``cuda`` to ``cpu`` as ``torch_npu.contrib.transfer_to_npu`` maps it to ``npu``, and
fills in what a CPU and gloo do otherwise. Every difference is a declared ``Piece`` in ``PIECES``, with its
reason and with what happens without it; docs/megatron-on-cpu.md lists them. This is for tests and the
demo, no product for training on CPUs.

``python -m mindspeed_precision.testing.cpu SCRIPT ARGS...`` runs a script that knows nothing of it.
"""

from __future__ import annotations

from mindspeed_precision.testing.cpu.registry import PIECES, install, installed_pieces
from mindspeed_precision.testing.piece import Piece

__all__ = ["PIECES", "Piece", "install", "installed_pieces"]
