"""What must be there before Megatron is imported: environment, a name of typing, triton, no compiler."""

from __future__ import annotations

import importlib.util
import os
import sys
import typing
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from mindspeed_precision.testing.piece import Piece

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}


def _set_environment() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _provide_override() -> None:
    if hasattr(typing, "override"):
        return

    def override(method: Any) -> Any:
        return method

    typing.override = override  # type: ignore[attr-defined]


def _leave_uncompiled() -> None:
    def compile(model: Any = None, **_: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = compile


class TritonStandIn:
    """Any object of triton that is only named, called or subscripted while a module is imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> TritonStandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return TritonStandIn(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> TritonStandIn:
        """Stand in for what the call would make, such as a ``triton.Config``."""
        return self

    def __repr__(self) -> str:
        return f"<{self._name}: triton is not installed>"


class TritonKernelStandIn:
    """A kernel that was decorated with ``triton.jit`` and can be launched nowhere."""

    def __init__(self, function: Any) -> None:
        self.fn = function

    def __getitem__(self, grid: Any) -> Any:
        raise NotImplementedError(
            f"triton kernel {getattr(self.fn, '__name__', self.fn)} was launched on a CPU"
        )

    __call__ = __getitem__


class TritonStandInModule(ModuleType):
    """Module ``triton`` or one below it, while triton is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return TritonStandIn(f"{self.__name__}.{name}")


def _jit(function: Any = None, **_: Any) -> Any:
    return TritonKernelStandIn(function) if function is not None else TritonKernelStandIn


def _pass_through(*_: Any, **__: Any) -> Any:
    return lambda function: function


def _stand_in_for_triton() -> None:
    if importlib.util.find_spec("triton") is not None:
        return
    from torch.utils._triton import has_triton_package

    has_triton_package()  # cached by torch, which has to go on without triton
    for name in ("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda"):
        module = TritonStandInModule(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    triton: Any = sys.modules["triton"]
    triton.__version__ = "3.0.0"
    triton.jit, triton.autotune, triton.heuristics = _jit, _pass_through, _pass_through


PIECES = (
    Piece(
        name="environment",
        why="validate_args wants CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism; dynamo has nothing"
        " to compile.",
        error_without="AssertionError: Using tensor model parallelism or context parallelism require "
        "setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1",
        when="TP or CP > 1",
        apply=_set_environment,
    ),
    Piece(
        name="typing_override",
        why="Megatron is written for Python 3.12 there; on an older one typing.override is all that is "
        "missing.",
        error_without="ImportError: cannot import name 'override' from 'typing'",
        when="Python before 3.12",
        versions=">=0.19",
        apply=_provide_override,
    ),
    Piece(
        name="no_compilation",
        why="jit_fuser is torch.compile: it would import the inductor, which is slow and is misled by the"
        " triton stand-in.",
        error_without="none: the import takes longer",
        when="every run",
        optional=True,
        apply=_leave_uncompiled,
    ),
    Piece(
        name="triton_stand_in",
        why="Modules of the training path import triton; its kernels are not launched.",
        error_without="ModuleNotFoundError: No module named 'triton'",
        when="every run of 0.18 and later where triton is not installed, some modules before",
        versions=">=0.16",
        apply=_stand_in_for_triton,
    ),
)
