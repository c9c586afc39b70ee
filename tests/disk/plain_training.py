"""A training of a small torch net, with or without a Session around it: what disks are failed under."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from mindspeed_precision import Session
from mindspeed_precision.testing.recorded import UNPINNED

STEPS = 6
EVERYTHING = ("capture.level=tensor",)


def train(
    out: Path | None = None,
    *,
    steps: int = STEPS,
    width: int = 16,
    overrides: Sequence[str] = (),
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Return the loss of each step.

    Args:
        out: run directory; None: nobody looks.
        steps: number of steps.
        width: of the net.
        overrides: settings.
        after: called with the number of each step that ended.
    """
    random.seed(1234)  # its state is recorded, and a fork seeds it anew
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.randn(steps, 8, width)
    if out is None:
        return [one_step(model, optimizer, data[step]) for step in range(steps)]
    settings = [*UNPINNED, *EVERYTHING, *overrides]
    losses = []
    with Session(model=model, optimizer=optimizer, out=out, overrides=settings) as session:
        for step in range(steps):
            losses.append(one_step(model, optimizer, data[step]))
            session.step(loss=losses[-1])
            after(step)
    return losses


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Return the loss before the update."""
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())
