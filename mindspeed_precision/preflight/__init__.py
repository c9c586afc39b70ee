"""What will bite, before any device is used: ``preflight``, from a launch and this machine's packages."""

from __future__ import annotations

from mindspeed_precision.preflight.checking import PREFLIGHT, preflight

__all__ = ["PREFLIGHT", "preflight"]
