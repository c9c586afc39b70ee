"""Frameworks behind one protocol (``base.Backend``); nothing here is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import cast

from mindspeed_precision.backends.base import Backend
from mindspeed_precision.errors import PrecisionError

_BACKENDS = {
    "torch": ("mindspeed_precision.backends.torch", "TorchBackend"),
    "mindspore": ("mindspeed_precision.backends.mindspore", "MindSporeBackend"),
}


def load_backend(name: str) -> Backend:
    """Import the framework ``name`` and return its backend.

    Raises:
        PrecisionError: no such backend, or its framework is not installed.
    """
    if name not in _BACKENDS:
        raise PrecisionError(
            "no such backend", found=repr(name), expected=f"one of {', '.join(sorted(_BACKENDS))}"
        )
    module, backend = _BACKENDS[name]
    try:
        return cast(Backend, getattr(importlib.import_module(module), backend)())
    except ImportError as error:
        raise PrecisionError(
            f"the backend {name} cannot be imported: {error}", remedy=f"install {name} in this environment"
        ) from error
