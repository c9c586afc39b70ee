"""Which framework this process computes with: asked of what is loaded, never assumed.

On Ascend the same Megatron code runs on torch_npu or on MindSpore under MSAdapter, where ``import torch`` is
a shim; a native MindSpore program has no ``torch`` at all.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.errors import PrecisionError

TORCH, TORCH_ON_MINDSPORE, MINDSPORE = "torch", "torch on mindspore", "mindspore"

_CAPTURE = {
    TORCH: ("mindspeed_precision.backends.torch_capture", "TorchCapture"),
    TORCH_ON_MINDSPORE: ("mindspeed_precision.backends.mindspore_torch", "MindSporeTorchCapture"),
    MINDSPORE: ("mindspeed_precision.backends.mindspore_native", "MindSporeCapture"),
}


_asked: list[str] = []
"""The framework of the model that is observed, where the process has two."""


@contextmanager
def observing(model: object) -> Iterator[None]:
    """Take ``model`` (or a list of chunks) as the answer, where a program has both torch and MindSpore.

    A native MindSpore program may import torch to read data or to convert a checkpoint.
    """
    first = model[0] if isinstance(model, (list, tuple)) and model else model
    cell = getattr(getattr(sys.modules.get("mindspore"), "nn", None), "Cell", None)
    native = isinstance(cell, type) and isinstance(first, cell)
    if not native:
        yield
        return
    _asked.append(MINDSPORE)
    try:
        yield
    finally:
        _asked.remove(MINDSPORE)


def loaded_framework() -> str | None:
    """Return ``TORCH``, ``TORCH_ON_MINDSPORE`` or ``MINDSPORE``, by what this process has loaded; or None.

    ``torch`` is MindSpore underneath when its tensors are MindSpore's. Inside `observing` the model decides.
    """
    if _asked:
        return _asked[-1]
    torch, mindspore = sys.modules.get("torch"), sys.modules.get("mindspore")
    if torch is not None:
        native = getattr(mindspore, "Tensor", None)
        tensor = getattr(torch, "Tensor", None)
        shim = isinstance(native, type) and isinstance(tensor, type) and issubclass(tensor, native)
        return TORCH_ON_MINDSPORE if shim else TORCH
    return None if mindspore is None else MINDSPORE


def framework() -> str:
    """Return what `loaded_framework` found.

    Raises:
        PrecisionError: no framework is loaded.
    """
    found = loaded_framework()
    if found is None:
        raise PrecisionError(
            "no framework is loaded in this process",
            expected="torch or mindspore",
            remedy="import the framework and build the model before the Session begins",
        )
    return found


def check_requested(argv: Sequence[str]) -> None:
    """Refuse a run whose command line names another framework than the one that computes.

    MindSpeed takes ``--ai-framework mindspore`` for the word that ``torch`` is MSAdapter's. Where PYTHONPATH
    does not put MSAdapter first, PyTorch is imported all the same, and the run is not what its name says.

    Args:
        argv: the program's arguments.

    Raises:
        PrecisionError: the two differ.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ai-framework")
    wanted = parser.parse_known_args(list(argv))[0].ai_framework
    found = loaded_framework()
    if wanted is None or found is None or (wanted == "mindspore") == (found != TORCH):
        return
    path = getattr(sys.modules.get("torch"), "__file__", None)
    raise PrecisionError(
        "another framework computes than the command line names",
        where=f"--ai-framework {wanted}",
        found={TORCH: f"PyTorch, from {path}"}.get(found, f"a torch that is MindSpore, from {path}"),
        expected="MSAdapter's torch" if wanted == "mindspore" else "PyTorch",
        remedy="put MSAdapter first on PYTHONPATH for MindSpore, leave it out for PyTorch (docs/ascend.md)",
    )


def capture_backend() -> CaptureBackend:
    """Return the backend for the framework of this process.

    Raises:
        PrecisionError: no framework is loaded.
    """
    module, name = _CAPTURE[framework()]
    return cast(CaptureBackend, getattr(importlib.import_module(module), name)())
