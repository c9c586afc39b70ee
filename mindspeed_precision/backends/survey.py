"""What this interpreter can train with: for ``mindspeed-precision environment``, before anything is run."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from dataclasses import dataclass

from mindspeed_precision.backends.detect import framework
from mindspeed_precision.backends.npu import Npu, installed_version, probe_npu
from mindspeed_precision.errors import PrecisionError

_DISTRIBUTIONS = (
    "mindspeed-precision",
    "torch",
    "torch-npu",
    "mindspore",
    "mindnlp",
    "megatron-core",
    "mindspeed",
    "mindspeed-llm",
    "transformer-engine",
    "numpy",
    "pandas",
    "safetensors",
)
_KINDS = {
    "torch": "PyTorch {torch}",
    "torch on mindspore": "MindSpore {mindspore} behind the torch API of {path}, which says it is {torch}",
    "mindspore": "MindSpore {mindspore}, native (no torch can be imported)",
}


@dataclass(frozen=True)
class Survey:
    """What was found, by importing it.

    Attributes:
        python: version of the interpreter.
        framework: ``torch``, ``torch on mindspore``, ``mindspore``; empty when none can be imported.
        described: the framework in words, or what importing one raised.
        npu: what is known of torch_npu.
        device: ``npu``, ``cuda`` or ``cpu``: what a run on this machine would compute on.
        packages: versions of the installed distributions that matter, by their metadata.
    """

    python: str
    framework: str
    described: str
    npu: Npu
    device: str
    packages: dict[str, str]

    def rows(self) -> list[tuple[str, str]]:
        """Return what to show a person, as (title, text)."""
        return [
            ("python", self.python),
            ("framework", self.described),
            ("npu", str(self.npu)),
            ("device", self.device or "none: nothing can be trained here; comparing needs no framework"),
            *(("package", f"{name} {version}") for name, version in self.packages.items()),
        ]


def survey() -> Survey:
    """Import what is installed and say what came of it.

    For a command that ends afterwards: it loads frameworks, and a failed import of torch cannot be repeated.
    """
    npu = (
        probe_npu()
    )  # before anything else imports torch: it is the one that catches what torch_npu does to it
    # what failed once fails the second time with another, misleading error
    failures = [npu.problem if "torch" not in sys.modules else "", _import("mindspore")]
    try:
        name = framework()
    except PrecisionError:
        name = ""
    return Survey(
        python=platform.python_version(),
        framework=name,
        described=_describe(name) if name else _absent(failures),
        npu=npu,
        device=_device(name, npu),
        packages=_packages(),
    )


def _import(name: str) -> str:
    """Import a framework; return what it raised, empty when nothing or when it is not there."""
    if name in sys.modules or importlib.util.find_spec(name) is None:
        return ""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the answer that was asked for
        return f"import {name} raises {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _describe(name: str) -> str:
    torch, mindspore = sys.modules.get("torch"), sys.modules.get("mindspore")
    return _KINDS[name].format(
        torch=getattr(torch, "__version__", "without a version"),
        mindspore=getattr(mindspore, "__version__", "without a version"),
        path=getattr(torch, "__file__", "memory"),
    )


def _absent(failures: list[str]) -> str:
    return "; ".join(text for text in failures if text) or "neither torch nor MindSpore is installed"


def _device(name: str, npu: Npu) -> str:
    if not name:
        return ""
    if name != "torch":
        target = str(sys.modules["mindspore"].get_context("device_target"))
        return {"Ascend": "npu", "GPU": "cuda"}.get(target, "cpu")
    if npu.usable:
        return "npu"
    return "cuda" if sys.modules["torch"].cuda.is_available() else "cpu"


def _packages() -> dict[str, str]:
    versions = {name: installed_version(name) for name in _DISTRIBUTIONS}
    return {name: version for name, version in versions.items() if version}


__all__ = ["Survey", "survey"]
