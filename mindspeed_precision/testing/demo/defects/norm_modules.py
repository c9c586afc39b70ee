"""A norm of one's own in Megatron's layers: ``norm_modules.py VARIANT SCRIPT ARGS…``.

- ``handed-on``: built with the epsilon that Megatron hands to it.
- ``default-eps``: its constructor takes an epsilon and does not hand it on, so that torch's 1e-5 counts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mindspeed_precision.testing.demo.defects.behind import run_behind


def install(*, handed_on: bool) -> None:
    """Give Megatron's layers this norm in place of theirs."""
    from megatron.core.models import backends
    from megatron.core.transformer import transformer_block

    class OwnNorm:
        """Builds torch's norm, as Megatron's ``WrappedTorchNorm`` does."""

        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
            return torch.nn.LayerNorm(hidden_size, **({"eps": eps} if handed_on else {}))

    backends.LNImpl = OwnNorm
    transformer_block.LayerNormImpl = OwnNorm


VARIANTS = {
    "handed-on": partial(install, handed_on=True),
    "default-eps": partial(install, handed_on=False),
}

if __name__ == "__main__":
    run_behind(VARIANTS)
