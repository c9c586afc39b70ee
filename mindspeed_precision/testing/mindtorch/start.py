"""What comes first: MindSpore computes in step with Python, and mindtorch takes the name ``torch``."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mindspeed_precision.testing.mindtorch.piece import CompatPiece, Mends, load
from mindspeed_precision.testing.mindtorch.tape import keep_native_methods

INERT = (
    *("distributed.tensor", "distributed.checkpoint", "distributed._tensor", "distributed._shard"),
    *("distributed.fsdp", "distributed._composable", "_inductor"),
)
"""Submodules of torch that mindtorch lacks or cannot import; megatron-core only names what is in them."""

_provided: list[str] = []


class InertModule(ModuleType):
    """A submodule of torch of which every name is an empty class: good for being imported, not for use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        placeholder = type(name, (), {"__module__": self.__name__, "__init__": _refuse_to_exist})
        setattr(self, name, placeholder)
        return placeholder


def _refuse_to_exist(self: object, *_: Any, **__: Any) -> None:
    kind = type(self)
    raise NotImplementedError(f"{kind.__module__}.{kind.__qualname__} does not exist in mindtorch")


class InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides the inert submodules under ``torch`` and ``mindtorch``, and tells on stderr of each."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an inert submodule or for one below it; None for anything else."""
        root, _, inner = fullname.partition(".")
        if root not in ("torch", "mindtorch") or not inner.startswith(INERT):
            return None
        _provided.append(fullname)
        if inner in INERT:
            sys.stderr.write(f"mindspeed-precision: {fullname} is inert: mindtorch has none\n")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return an empty module whose names appear when they are asked for."""
        module = InertModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is nothing to execute."""


def inert_modules() -> tuple[str, ...]:
    """Return the inert submodules that this process has imported."""
    return tuple(_provided)


def _launch_blocking() -> None:
    load("mindspore").runtime.launch_blocking()


def _import_mindtorch() -> None:
    keep_native_methods()
    load("mindtorch")


def _provide_inert_modules() -> None:
    sys.meta_path.insert(0, InertFinder())  # before mindtorch's own finder, which would raise


PIECES = (
    CompatPiece(
        name="launch_blocking",
        mends=Mends.MINDSPORE_CPU,
        changes=("mindspore.runtime.launch_blocking()",),
        why="Operations run behind Python's back otherwise: an error is raised by a later, unrelated "
        "operation, and on a busy machine a step takes ten times as long. The bits are the same.",
        error_without="none in a good run; a wrong place in every traceback",
        when="every run",
        apply=_launch_blocking,
        optional=True,
    ),
    CompatPiece(
        name="torch_is_mindtorch",
        mends=Mends.MINDTORCH,
        changes=("sys.meta_path", "sys.modules['torch']", "importlib.metadata"),
        why="import mindtorch puts a finder on sys.meta_path that answers import torch; torch itself may "
        "not be installed beside it. This piece is that import, after launch_blocking; MindSpore's own "
        "register_hook and contiguous are kept before mindtorch replaces them.",
        error_without="AttributeError: type object 'Tensor' has no attribute "
        "'_mindspeed_precision_native_contiguous'",
        when="every run",
        apply=_import_mindtorch,
    ),
    CompatPiece(
        name="inert_submodules",
        mends=Mends.MINDTORCH,
        changes=tuple(f"torch.{name}" for name in INERT),
        why="megatron-core imports names from DTensor, FSDP, distributed checkpoints and the inductor. "
        "mindtorch's own copies of them do not import. Each is announced on stderr, and refuses to be "
        "used.",
        error_without="AttributeError: module 'mindtorch.ops.aten' has no attribute 'all'",
        when="every run",
        apply=_provide_inert_modules,
    ),
)
