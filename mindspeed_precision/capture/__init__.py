"""Capture: hooks and wrappers that see live tensors and hand them to the record stage.

``attach`` is the one verb: it puts every observer that the settings ask for around a model and its optimizer.
Observers never change a bit of what they observe (``tests/capture/test_bit_neutrality.py``).
"""

from __future__ import annotations

from typing import Any

from mindspeed_precision.capture.context import CaptureContext
from mindspeed_precision.capture.gradients import attach_gradients, detach
from mindspeed_precision.capture.modules import attach_modules
from mindspeed_precision.capture.optimizer import attach_optimizer

__all__ = ["attach", "detach"]


def attach(context: CaptureContext, chunks: list[Any], optimizer: Any) -> list[Any]:
    """Attach the observers and return what ``detach`` takes.

    Args:
        context: the run.
        chunks: the model chunks as the loop holds them, wrappers included.
        optimizer: the outermost optimizer, or None when the loop has none.
    """
    kept: list[Any] = [*attach_modules(context)]
    context.gathers_late = _any_chunk(chunks, "overlap_param_gather")
    if context.settings.wgrad:
        kept += attach_gradients(context, overlapping=_any_chunk(chunks, "overlap_grad_reduce"))
    if optimizer is not None and context.settings.optimizer:
        kept += attach_optimizer(context, optimizer)
    return kept


def _any_chunk(chunks: list[Any], option: str) -> bool:
    return any(getattr(getattr(chunk, "ddp_config", None), option, False) for chunk in chunks)
