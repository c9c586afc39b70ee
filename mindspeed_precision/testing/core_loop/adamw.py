"""AdamW that changes no tensor in place but the parameter, as a whole: the same code on every framework."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay: algorithm 2 of https://arxiv.org/abs/1711.05101.

    The arithmetic is that of ``torch.optim.AdamW`` without ``amsgrad``, in float32. It is out of place since
    MindSpore on a CPU leaves the target of in-place arithmetic unchanged; ``copy_`` to a whole parameter
    works.

    Args:
        params: parameters or groups; a group may have ``lr`` and ``weight_decay`` of its own.
        lr: learning rate.
        betas: decay of the averages of gradient and squared gradient.
        eps: added to the root of the second average.
        weight_decay: decoupled: ``lr * weight_decay * parameter`` is subtracted.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient; ``closure`` is not supported.

        Raises:
            NotImplementedError: a closure was given.
        """
        if closure is not None:
            raise NotImplementedError("AdamW.step takes no closure")
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        beta1, beta2 = group["betas"]
        if not state:
            zeros = torch.zeros_like(gradient)
            state.update(step=0, exp_avg=zeros, exp_avg_sq=zeros)
        step = state["step"] + 1
        exp_avg = state["exp_avg"] + (gradient - state["exp_avg"]) * (1 - beta1)
        exp_avg_sq = state["exp_avg_sq"] * beta2 + gradient * gradient * (1 - beta2)
        root = torch.sqrt(exp_avg_sq) / math.sqrt(1 - beta2**step) + group["eps"]
        decayed = parameter.detach() * (1 - group["lr"] * group["weight_decay"])
        parameter.copy_(decayed - (exp_avg / root) * (group["lr"] / (1 - beta1**step)))
        state.update(step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
