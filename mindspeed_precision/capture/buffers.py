"""Buffers: what modules keep from step to step, and no optimizer updates.

A router's bias, the running statistics of a norm, the frequencies of a rotary embedding.
"""

from __future__ import annotations

from mindspeed_precision.capture.context import CaptureContext
from mindspeed_precision.records import PERSISTENT, Phase, Role


def observe_buffers(context: CaptureContext, phase: Phase) -> None:
    """Record the registered buffers of every module: before the first step, and as each step leaves them.

    Args:
        context: the run.
        phase: ``init`` or ``optimizer``.
    """
    if not context.settings.modules:
        return
    seen: set[int] = set()
    for fqn, module in context.names.modules:
        for name, buffer, persistent in context.backend.own_buffers(module):
            if id(buffer) in seen:
                continue
            seen.add(id(buffer))
            full = f"{fqn}.{name}" if fqn else name
            tensor = context.backend.detach(buffer)
            context.observe(phase, full, Role.BUFFER, tensor, slot=PERSISTENT if persistent else "")
