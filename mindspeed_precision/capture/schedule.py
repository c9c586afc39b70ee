"""The schedule of learning rate and weight decay: what it is made of, and each step that it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_precision.capture.configuration import plain
from mindspeed_precision.capture.context import active
from mindspeed_precision.records import SCHEDULE, Phase, Role

_ATTRIBUTES = (
    "init_lr", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "wsd_decay_steps",
    "lr_wsd_decay_style", "start_wd", "end_wd", "wd_incr_steps", "wd_incr_style",
)  # fmt: skip


def observe_schedule(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record by how much the schedule was stepped, and to which count.

    Wraps ``step(self, increment)`` of Megatron's ``OptimizerParamScheduler``. Steps that it makes while it is
    built or loaded are outside of a training step and are not seen; they show in the count.
    """
    result = wrapped(*args, **kwargs)
    context = active()
    if context is not None and context.settings.optimizer:
        context.schedule = {name: plain(getattr(instance, name, None)) for name in _ATTRIBUTES}
        increment = args[0] if args else kwargs["increment"]
        occurrence = context.clock.count_schedule_step()
        for slot, value in (("increment", increment), ("num_steps", getattr(instance, "num_steps", None))):
            if isinstance(value, (int, float)):
                site = context.recorder.site(
                    Phase.OPTIMIZER, SCHEDULE, Role.HYPERPARAMETER, slot, occurrence=occurrence
                )
                if site is not None:
                    context.recorder.observe_number(site, value)
    return result
