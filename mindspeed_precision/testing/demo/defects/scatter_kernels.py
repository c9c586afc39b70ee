"""The backward of an embedding, as three kernels write it: ``scatter_kernels.py VARIANT SCRIPT ARGS…``.

The gradient of a row of the table is the sum of the gradients of the tokens that read it.

- ``in-order``: added in the order of the tokens.
- ``as-they-finish``: added in the order in which threads finish, as by atomic additions: other bits every
  time.
- ``12-slots``: collects up to 12 tokens for a row, and forgets a row for which there are more: rare, and
  small.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from mindspeed_precision.testing.demo.defects.behind import run_behind

SLOTS = 12


def in_order(indices: torch.Tensor) -> torch.Tensor:
    """Return the positions of the tokens ``[t]`` in the order in which they are added."""
    return torch.arange(indices.numel())


def as_they_finish(indices: torch.Tensor) -> torch.Tensor:
    """Return the positions in an order of this moment, which no seed decides."""
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
    return torch.randperm(indices.numel(), generator=generator)


def into_slots(indices: torch.Tensor) -> torch.Tensor:
    """Return the positions of the tokens that come no more than 12 times."""
    times = (indices[:, None] == indices[None, :]).sum(dim=1)
    return (times <= SLOTS).nonzero().flatten()


class Embedding(torch.autograd.Function):
    """A look-up whose backward adds rows in the order that ``positions`` gives."""

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor, positions: Any) -> torch.Tensor:
        """Return the rows of ``weight`` ``[v, h]`` that ``indices`` name."""
        ctx.save_for_backward(indices)
        ctx.rows, ctx.positions = weight.shape[0], positions
        return weight[indices]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        """Return the gradient of the table."""
        (indices,) = ctx.saved_tensors
        indices, rows = indices.flatten(), gradients[0].flatten(0, -2)
        table = torch.zeros(ctx.rows, rows.shape[-1], dtype=rows.dtype)
        for position in ctx.positions(indices).tolist():
            table[indices[position]] += rows[position]
        return None, table, None


def install(positions: Any) -> None:
    """Give ``torch.nn.functional.embedding`` this backward."""

    def embedding(indices: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> Any:
        return Embedding.apply(indices, weight, positions)

    torch.nn.functional.embedding = embedding


VARIANTS = {
    "in-order": partial(install, in_order),
    "as-they-finish": partial(install, as_they_finish),
    "12-slots": partial(install, into_slots),
}

if __name__ == "__main__":
    run_behind(VARIANTS)
