"""One generator serves host and device on a CPU: host-side draws must not move it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch.utils.data import dataloader

from mindspeed_precision.testing.piece import Piece


def _keep_state_over_loader_creation() -> None:
    iterator_class: Any = dataloader._BaseDataLoaderIter
    original = iterator_class.__init__

    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        try:
            original(self, *args, **kwargs)
        finally:
            torch.set_rng_state(state)

    iterator_class.__init__ = create


def _drop_notice() -> None:
    def says_something_else(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(says_something_else)


PIECES = (
    Piece(
        name="loader_randomness",
        why="A DataLoader iterator draws its base seed from the host's generator, and only the first "
        "tensor-parallel rank makes one. On a CPU that is the device's generator too: its dropout "
        "masks would part from the other ranks'. The state is put back.",
        error_without="silent: gradients of replicated parameters (norm weights, row-parallel biases) differ "
        "between tensor-parallel ranks",
        when="TP > 1 with dropout",
        apply=_keep_state_over_loader_creation,
    ),
    Piece(
        name="shared_generator_notice",
        why="The RNG tracker warns when the host's generator moves inside a device generator's context; "
        "here they are one, so that it always does.",
        error_without="none: a warning per layer and microbatch that means nothing",
        when="every run",
        optional=True,
        apply=_drop_notice,
    ),
)
