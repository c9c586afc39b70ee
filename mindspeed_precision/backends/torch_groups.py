"""What a ``torch.optim`` optimizer does, by its parameter groups and state, on every backend alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mindspeed_precision.backends.base import Backend
from mindspeed_precision.backends.capture_base import Update

HYPERPARAMETERS = ("lr", "weight_decay", "eps", "betas", "momentum", "step", "wd_mult", "lr_mult")
_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def group_updates(backend: Backend, optimizer: Any) -> Iterator[Update]:
    """Yield everything in the groups of ``optimizer`` that has a gradient (``.grad``, or a decoupled one)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                gradient = getattr(parameter, "decoupled_grad", None)
            if gradient is not None:
                state = optimizer.state.get(parameter, {})
                yield Update(
                    updated=parameter,
                    gradient=gradient,
                    hyperparameters=applied_hyperparameters(group, state),
                    states={name: state[name] for name in _STATES if backend.is_tensor(state.get(name))},
                )


def split_groups(groups: Iterable[Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return parameter groups as their settings and what is updated by them."""
    return [
        ({name: value for name, value in group.items() if name != "params"}, list(group["params"]))
        for group in groups
    ]


def applied_hyperparameters(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is applied: from the group or, where it is counted per tensor (``step``), the state."""
    found: dict[str, Any] = {}
    for name in HYPERPARAMETERS:
        value = group.get(name, state.get(name))
        if name == "step" and value is None:
            value = 0  # no step was made with this parameter yet
        if value is None:
            continue
        found.update({"beta1": value[0], "beta2": value[1]} if name == "betas" else {name: value})
    return found
