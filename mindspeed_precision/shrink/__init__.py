"""The smallest launch that keeps the structure of a big one and fits one node."""

from __future__ import annotations

from mindspeed_precision.shrink.shrinking import shrink

__all__ = ["shrink"]
