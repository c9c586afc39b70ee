"""The launch that is examined, as rules see it: names to values, and what is installed."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from mindspeed_precision.backends.npu import installed_version
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches import Launch

BACKENDS = {"pta": "npu", "mindspore": "npu", "cuda": "cuda", "cpu": "cpu"}
"""What computes, with the device on which it does."""

PACKAGES = (
    *("torch", "torch-npu", "mindspore", "mindnlp", "megatron-core", "mindspeed", "mindspeed-llm"),
    *("transformer-engine", "triton", "apex", "flash-attn", "numpy", "pandas", "safetensors"),
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A launch with the backend that it is for.

    Attributes:
        launch: as read.
        backend: ``pta``, ``mindspore``, ``cuda`` or ``cpu``.
        chosen: what the backend was taken from, for people.
        versions: installed packages that matter, by name; ``python`` is among them.
    """

    launch: Launch
    backend: str
    chosen: str
    versions: Mapping[str, str]

    @property
    def device(self) -> str:
        """``npu``, ``cuda`` or ``cpu``."""
        return BACKENDS[self.backend]

    @cached_property
    def _derived(self) -> Mapping[str, Any]:
        arguments, world = self.launch.arguments, self.launch.world_size
        tp, pp = (
            arguments.integer("tensor_model_parallel_size"),
            arguments.integer("pipeline_model_parallel_size"),
        )
        model = tp * pp * arguments.integer("context_parallel_size")
        return {
            "backend": self.backend,
            "launcher": self.launch.launcher,
            "world_size": world,
            "model_parallel_size": model,
            "data_parallel_size": None if world is None or not model or world % model else world // model,
            "expert_tensor_size": arguments.integer("expert_tensor_parallel_size", tp),
        }

    def value(self, name: str) -> Any:
        """Return what a name of a rule stands for: a size, an environment variable, or a setting."""
        if name in self._derived:
            return self._derived[name]
        if name.isupper():
            return self.launch.environment.get(name)
        return self.launch.arguments.value(name)


def plan(launch: Launch, backend: str | None = None) -> Planned:
    """Add to a launch what it would run on; nothing is imported.

    Args:
        launch: as read.
        backend: ``pta``, ``mindspore``, ``cuda`` or ``cpu``; None: from the launch or what is installed.

    Raises:
        ConfigError: there is no such backend.
    """
    if backend is not None and backend not in BACKENDS:
        raise ConfigError("no such backend", where="--backend", found=backend, expected=", ".join(BACKENDS))
    versions = installed_versions(launch.environment)
    found, chosen = (backend, "--backend") if backend else _backend(launch, versions)
    return Planned(launch=launch, backend=found, chosen=chosen, versions=versions)


def _backend(launch: Launch, versions: Mapping[str, str]) -> tuple[str, str]:
    arguments = launch.arguments
    if arguments.value("ai_framework") == "mindspore":
        return "mindspore", "--ai-framework mindspore"
    if launch.launcher == "msrun":
        return "mindspore", "msrun"
    if "mindspeed_precision.testing.cpu" in launch.head:
        return "cpu", "the layer that maps cuda to the host"
    if arguments.value("distributed_backend") == "gloo":
        return "cpu", "--distributed-backend gloo"
    if arguments.on("npu_deterministic"):
        return "pta", "--npu-deterministic"
    if "torch-npu" in versions:
        return "pta", f"torch-npu {versions['torch-npu']} is installed"
    if "torch" not in versions and "mindspore" in versions:
        return "mindspore", f"mindspore {versions['mindspore']} is installed, and no torch"
    if "+cpu" in versions.get("torch", ""):
        return "cpu", f"torch {versions['torch']} is installed"
    return "cuda", "nothing says otherwise"


def installed_versions(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of what is installed and matters, by metadata alone.

    Args:
        environment: of the launch: ``PYTHONPATH`` may hold a Megatron that is not installed.
    """
    installed = {name: installed_version(name) for name in PACKAGES}
    found = {"python": platform.python_version(), **{name: text for name, text in installed.items() if text}}
    checkout = _megatron_on(environment.get("PYTHONPATH", ""))
    if checkout:
        found["megatron-core"] = checkout  # it comes before what is installed
    return found


def _megatron_on(search: str) -> str:
    """Return the version of the first megatron-core on a search path, read from its source."""
    for directory in search.split(os.pathsep):
        info = Path(directory) / "megatron" / "core" / "package_info.py"
        if not directory or not info.is_file():
            continue
        parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", info.read_text("utf-8"), re.MULTILINE))
        if len(parts) == 3:
            return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"
    return ""


def version_of(text: str) -> Version | None:
    """Return a version, or None where the text is none."""
    try:
        return Version(text)
    except InvalidVersion:
        return None
