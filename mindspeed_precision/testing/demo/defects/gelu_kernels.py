"""The activation ``x sigmoid(1.702 x)``, as three kernels write it: ``gelu_kernels.py VARIANT SCRIPT ARGS…``.

- ``sigmoid``: as it stands.
- ``exp``: ``x / (1 + exp(-1.702 x))``: the same, rounded otherwise.
- ``exp-fp16``: the same, computed in float16 inside, whatever it is given, as a kernel for speed does. Below
  -6.52 the exponential is infinite: the result is still right, its gradient is 0 x infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mindspeed_precision.testing.demo.defects.behind import run_behind

Activation = Callable[[torch.Tensor], torch.Tensor]


def by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return ``x sigmoid(1.702 x)``, any shape."""
    return x * torch.sigmoid(1.702 * x)


def by_exp(x: torch.Tensor) -> torch.Tensor:
    """Return the same by an exponential."""
    return x / (1 + torch.exp(-1.702 * x))


def by_exp_in_half(x: torch.Tensor) -> torch.Tensor:
    """Return the same, computed in float16, in the type of ``x``."""
    return by_exp(x.half()).to(x.dtype)


def install(activation: Activation) -> None:
    """Give every MLP of Megatron this activation."""
    from megatron.core.transformer.mlp import MLP

    original = MLP.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.activation_func = activation

    MLP.__init__ = built


VARIANTS = {
    "sigmoid": partial(install, by_sigmoid),
    "exp": partial(install, by_exp),
    "exp-fp16": partial(install, by_exp_in_half),
}

if __name__ == "__main__":
    run_behind(VARIANTS)
