"""Ask about ``torch_npu`` without being hurt by it: the only place that decides whether there is an NPU.

Installed on a machine without CANN, ``torch_npu`` cannot be imported (a missing ``libhccl.so`` is an
ImportError), leaves ``torch_npu._init`` and others in ``sys.modules``, and, since torch loads it by itself,
makes ``import torch`` raise RuntimeError. So being installed, being in ``sys.modules`` and being usable are
three facts.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mindspeed_precision.errors import PrecisionError

FAILURES = (ImportError, OSError, RuntimeError)
"""What a framework raises that is installed and does not fit this machine."""

AUTOLOAD_OFF = "TORCH_DEVICE_BACKEND_AUTOLOAD=0"


@dataclass(frozen=True)
class Npu:
    """What is known of ``torch_npu`` in this process.

    Attributes:
        installed: version of the installed distribution; empty when there is none.
        loaded: version of the module that is imported whole; empty when none is.
        usable: ``torch.npu.is_available()`` said yes.
        problem: what importing it, or asking it, raised; empty when nothing did.
        remedy: what to do about the problem; empty when there is nothing to do.
    """

    installed: str = ""
    loaded: str = ""
    usable: bool = False
    problem: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return one line for a person."""
        version = self.installed or self.loaded
        if not version:
            return self.problem or "torch_npu is not installed"
        if self.problem:
            remedy = f"; {self.remedy}" if self.remedy else ""
            return f"torch_npu {version} is installed and not usable: {self.problem}{remedy}"
        if self.usable:
            return f"usable, torch_npu {self.loaded}"
        if self.loaded:
            return f"torch_npu {self.loaded} is loaded and finds no device"
        return f"torch_npu {self.installed} is installed and not loaded"


def loaded_npu() -> Npu:
    """Say what this process has loaded so far; imports nothing."""
    installed, module = installed_version("torch-npu"), _whole("torch_npu")
    if module is None:
        left = sorted(name for name in sys.modules if name.partition(".")[0] == "torch_npu")
        problem = f"its import failed or is not over, {', '.join(left[:3])} is left" if left else ""
        return Npu(installed=installed, problem=problem)
    loaded = str(getattr(module, "__version__", "of an unknown version"))
    device = getattr(sys.modules.get("torch"), "npu", None)
    if device is None:
        return Npu(installed=installed, loaded=loaded, problem="it is imported and torch.npu is missing")
    try:
        return Npu(installed=installed, loaded=loaded, usable=bool(device.is_available()))
    except FAILURES as error:
        return Npu(installed=installed, loaded=loaded, problem=_said(error))


def probe_npu() -> Npu:
    """Import torch and ``torch_npu`` and say what came of it.

    For a command that ends afterwards: an import of torch that fails cannot be repeated in the same process
    (it raises something else, and the interpreter may crash at its end).
    """
    installed = installed_version("torch-npu")
    try:
        importlib.import_module("torch")
    except FAILURES as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return Npu(installed=installed)
        remedy = f"set {AUTOLOAD_OFF} so that torch leaves it alone, or source CANN's set_env.sh"
        problem = f"import torch raises {_said(error)}"
        return Npu(installed=installed, problem=problem, remedy=remedy if installed else "")
    if importlib.util.find_spec("torch_npu") is None:
        return Npu(installed=installed)
    try:
        importlib.import_module("torch_npu")
    except FAILURES as error:
        remedy = f"source CANN's set_env.sh, or uninstall torch-npu; {AUTOLOAD_OFF} keeps torch itself usable"
        return Npu(installed=installed, problem=f"import torch_npu raises {_said(error)}", remedy=remedy)
    return loaded_npu()


def require_torch() -> None:
    """Import torch where torch_npu is installed, and refuse to go on when that breaks torch.

    Without torch_npu it does nothing, and imports nothing.

    Raises:
        PrecisionError: torch cannot be imported.
    """
    if not installed_version("torch-npu") or "torch" in sys.modules:
        return
    found = probe_npu()
    if found.problem and "torch" not in sys.modules:
        raise PrecisionError(
            "torch cannot be imported, so nothing that needs it can be looked at",
            found=found.problem,
            expected="a torch that imports",
            remedy=found.remedy,
        )


def npu_module() -> Any:
    """Return ``torch.npu`` where it is usable, else None; imports nothing."""
    return getattr(sys.modules.get("torch"), "npu", None) if loaded_npu().usable else None


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, read from its metadata; empty when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _whole(name: str) -> ModuleType | None:
    module = sys.modules.get(name)
    # while a module runs its own text it is in sys.modules already
    importing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if module is None or importing else module


def _said(error: BaseException) -> str:
    """Return the error and, where another caused it, that one too: torch's own message names no library."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if (cause := error.__cause__) is None:
        return text
    return f"{text} (because of {type(cause).__name__}: {' '.join(str(cause).split())})"


__all__ = [
    "AUTOLOAD_OFF",
    "FAILURES",
    "Npu",
    "installed_version",
    "loaded_npu",
    "npu_module",
    "probe_npu",
    "require_torch",
]
