"""Seeds of every random generator that a training run draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from mindspeed_precision.backends.npu import npu_module
from mindspeed_precision.errors import ConfigError

LARGEST_SEED = 2**32 - 1
"""numpy and MindSpore refuse more; torch would take 64 bits."""


def seed_everything(seed: int) -> tuple[str, ...]:
    """Seed python, numpy and, where they are loaded, torch, torch.cuda, torch_npu and mindspore.

    Frameworks are seeded only when the program has imported them: this never imports one.

    Args:
        seed: 0 to 2**32 - 1.

    Returns:
        The generators that were seeded.

    Raises:
        ConfigError: ``seed`` is out of range or no whole number.
    """
    check_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # the legacy global generator is the one that user code draws from
    seeded = ["python", "numpy"]
    torch = sys.modules.get("torch")
    if torch is not None:
        seeded += _seed_torch(torch, seed)
    mindspore = sys.modules.get("mindspore")
    if mindspore is not None:
        mindspore.set_seed(seed)
        mindspore.manual_seed(seed)  # the default generator: set_seed does not reach it in 2.7.1
        seeded.append("mindspore")
    return tuple(seeded)


def check_seed(seed: Any) -> None:
    """Refuse a seed that not every generator takes.

    Raises:
        ConfigError: ``seed`` is out of range or no whole number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(
            "not a seed that every generator takes",
            where="determinism.seed",
            found=repr(seed),
            expected=f"a whole number from 0 to {LARGEST_SEED}",
        )


def _seed_torch(torch: Any, seed: int) -> list[str]:
    torch.manual_seed(seed)
    seeded = ["torch"]
    # without a device the call would be queued for ever; is_available initialises none
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
        seeded.append("cuda")
    if (npu := npu_module()) is not None:
        npu.manual_seed_all(seed)
        npu.manual_seed(seed)
        seeded.append("npu")
    return seeded
