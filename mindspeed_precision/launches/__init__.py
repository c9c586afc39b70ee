"""A launch, read before anything is started: its environment, its launcher and its arguments.

Nothing here runs a command, evaluates a script or imports a framework.
"""

from __future__ import annotations

from mindspeed_precision.launches.arguments import Argument, Arguments
from mindspeed_precision.launches.command import Launch
from mindspeed_precision.launches.reading import read_launch

__all__ = ["Argument", "Arguments", "Launch", "read_launch"]
