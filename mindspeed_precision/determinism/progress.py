"""How far a process has got: what can no longer take effect. Looks only at what is loaded already."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Deadline(str, Enum):
    """Until when an environment variable can still take effect."""

    INTERPRETER_START = "the interpreter starts"
    FRAMEWORK_IMPORT = "the framework is imported"
    DEVICE_INIT = "the device is initialised"
    PROCESS_GROUP = "the process group exists"
    FIRST_USE = "the device is first used"
    ANY_TIME = "any time"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Deadlines that have passed.

    Attributes:
        passed: deadline to the fact that shows it (``torch.distributed is initialised``).
        start_environment: the environment that the interpreter was started with; None where the system
            does not tell.
        ignores_environment: the interpreter was started with ``-E`` or ``-I`` and reads no ``PYTHON*``.
    """

    passed: Mapping[Deadline, str] = field(default_factory=dict)
    start_environment: Mapping[str, str] | None = None
    ignores_environment: bool = False


def look(device: str) -> Progress:
    """Look how far this process has got on ``device``, without importing or initialising anything.

    Args:
        device: ``npu``, ``cuda`` or ``cpu``.
    """
    passed = {Deadline.INTERPRETER_START: "this interpreter is running"}
    torch = sys.modules.get("torch")
    if torch is not None or "mindspore" in sys.modules:
        passed[Deadline.FRAMEWORK_IMPORT] = f"{'torch' if torch is not None else 'mindspore'} is imported"
    if _has_process_group(torch):
        passed[Deadline.PROCESS_GROUP] = "torch.distributed is initialised"
    runtime = getattr(torch, device, None) if device != "cpu" else None
    if _calls_true(runtime, "is_initialized"):
        passed[Deadline.DEVICE_INIT] = f"torch.{device} is initialised"
        if _calls_true(runtime, "max_memory_allocated"):
            passed[Deadline.FIRST_USE] = f"memory was allocated on {device}"
    return Progress(
        passed=passed,
        start_environment=start_environment(),
        ignores_environment=bool(sys.flags.ignore_environment),
    )


def _has_process_group(torch: Any) -> bool:
    distributed = getattr(torch, "distributed", None)
    return _calls_true(distributed, "is_available") and _calls_true(distributed, "is_initialized")


def _calls_true(owner: Any, name: str) -> bool:
    function = getattr(owner, name, None)
    return bool(callable(function) and function())


def start_environment() -> dict[str, str] | None:
    """Return the environment with which this interpreter was started, or None where the system hides it.

    ``os.environ`` cannot tell an exported variable from one that the process assigned to itself; Linux can.
    """
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    lines = raw.decode(errors="surrogateescape").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)
