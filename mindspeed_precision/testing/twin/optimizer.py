"""Optimizers of the twin: one of ours, and MindSpore's, those that work on a CPU and those that do not.

All have MindSpore's shape: ``parameters`` in the order of the gradients, ``param_groups``, ``exp_avg`` and
``exp_avg_sq`` where there are moments, and they are called with the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Parameter, Tensor, mint, ops
from mindspore.experimental import optim

from mindspeed_precision.testing.twin.settings import TwinSettings


class AdamW(optim.Optimizer):
    """AdamW, operation by operation as ``torch.optim.AdamW``'s single-tensor implementation.

    Every result is a new tensor, assigned at the end: MindSpore's in-place arithmetic leaves its target as it
    is on a CPU. Rates stay Python floats, as in torch.

    Args:
        groups: ``{"params": [...], "weight_decay": ...}`` each.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the denominator.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.exp_avg = self.parameters.clone(prefix="exp_avg", init="zeros")
        self.exp_avg_sq = self.parameters.clone(prefix="exp_avg_sq", init="zeros")
        self.steps_taken = 0
        set_learning_rate(self, lr)

    def construct(self, gradients: Sequence[Tensor]) -> bool:
        """Update every parameter; ``gradients`` in the order of ``self.parameters``."""
        self.steps_taken += 1
        for number, group in enumerate(self.param_groups):
            for index in range(self.group_start_id[number], self.group_start_id[number + 1]):
                self._update(index, gradients[index], group)
        return True

    def _update(self, index: int, gradient: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        mean, square = self.exp_avg[index], self.exp_avg_sq[index]
        step_size = group["lr"] / (1 - beta1**self.steps_taken)
        correction = math.sqrt(1 - beta2**self.steps_taken)
        decayed = self.parameters[index] * (1 - group["lr"] * group["weight_decay"])
        new_mean = mean + (gradient - mean) * (1 - beta1)
        new_square = square * beta2 + (gradient * gradient) * (1 - beta2)
        denominator = mint.sqrt(new_square) / correction + group["eps"]
        ops.assign(mean, new_mean)
        ops.assign(square, new_square)
        ops.assign(self.parameters[index], decayed - step_size * (new_mean / denominator))


def build_optimizer(parameters: Sequence[Parameter], settings: TwinSettings) -> Any:
    """Return the optimizer that ``settings.optimizer`` names, over Megatron's two parameter groups."""
    return _BUILDERS[settings.optimizer](_groups(parameters, settings), settings)


def _groups(parameters: Sequence[Parameter], settings: TwinSettings) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _ours(groups: list[dict[str, Any]], settings: TwinSettings) -> Any:
    return AdamW(groups, settings.lr, settings.betas, settings.adam_eps)


def _experimental_adamw(groups: list[dict[str, Any]], settings: TwinSettings) -> Any:
    return optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.adam_eps)


def _mint_adam(groups: list[dict[str, Any]], settings: TwinSettings) -> Any:
    from mindspore.mint import optim as mint_optim

    return mint_optim.Adam(groups, lr=settings.lr, betas=settings.betas, eps=settings.adam_eps)


def _mint_sgd(groups: list[dict[str, Any]], settings: TwinSettings) -> Any:
    from mindspore.mint import optim as mint_optim

    return mint_optim.SGD(groups, lr=settings.lr)


_BUILDERS: dict[str, Callable[[list[dict[str, Any]], TwinSettings], Any]] = {
    "adamw": _ours,
    "experimental.adamw": _experimental_adamw,
    "mint.adam": _mint_adam,
    "mint.sgd": _mint_sgd,
}


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the rate of every group; MindSpore keeps it in a Parameter, ``AdamW`` in a float."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Parameter) and not isinstance(optimizer, AdamW):
            ops.assign(group["lr"], Tensor(rate, group["lr"].dtype))
        else:
            group["lr"] = rate


def learning_rate(settings: TwinSettings, step: int) -> float:
    """Return the rate of ``step``, 0-based: Megatron's cosine from ``lr`` to ``min_lr`` over all steps."""
    if settings.min_lr is None:
        return settings.lr
    done = min(1.0, step / settings.steps)
    share = 0.5 * (math.cos(math.pi * done) + 1.0)
    return settings.min_lr + share * (settings.lr - settings.min_lr)
