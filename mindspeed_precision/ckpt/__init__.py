"""Two checkpoints, parameter by parameter, whatever their formats and layouts: read without any framework."""

from __future__ import annotations

from mindspeed_precision.ckpt.opening import open_checkpoint

__all__ = ["open_checkpoint"]
