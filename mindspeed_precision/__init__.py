"""Find the first tensor at which two training runs diverge, and prove why.

The flow, each arrow one type of ``records``::

    pretrain → determinism → capture → record → dump      in the training process
                                                ↓ files
               align → compare → diagnose → report        anywhere: numpy and pandas, no framework

``pretrain`` is the drop-in for Megatron's; ``Session`` does the same around any loop; ``load_run`` opens what
they wrote. ``compare_runs`` answers for two of them, ``verify_runs`` for what went into them, and
``check_run`` for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_precision.pretrain import pretrain, wrap

if TYPE_CHECKING:
    from mindspeed_precision.flow import compare_runs
    from mindspeed_precision.loading import load_run
    from mindspeed_precision.session import Session
    from mindspeed_precision.verify.check import check_run
    from mindspeed_precision.verify.verify import verify_runs

__version__ = "0.1.0"
__all__ = [
    "pretrain",
    "wrap",
    "Session",
    "load_run",
    "compare_runs",
    "check_run",
    "verify_runs",
    "__version__",
]

_LAZY = {
    "Session": ("mindspeed_precision.session", "Session"),
    "load_run": ("mindspeed_precision.loading", "load_run"),
    "compare_runs": ("mindspeed_precision.flow", "compare_runs"),
    "check_run": ("mindspeed_precision.verify.check", "check_run"),
    "verify_runs": ("mindspeed_precision.verify.verify", "verify_runs"),
}


def __getattr__(name: str) -> Any:
    """Import the stages only when they are asked for: a training rank needs no pandas, a laptop no torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
