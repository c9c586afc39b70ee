"""Two ranks train a small net under torchrun; one dies once. With a run directory it is recorded, else not.

torchrun --max-restarts 6 elastic.py CHECKPOINT LOSSES [RUN]
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_precision import Session
from mindspeed_precision.testing.recorded import UNPINNED

STEPS, DEATH, KEPT = 6, 4, 3  # dies in step 4, when the checkpoint before step 3 is the last one


def main() -> None:
    """Train from the checkpoint, if there is one."""
    checkpoint, losses = Path(sys.argv[1]), Path(sys.argv[2])
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # a store of its own for each attempt: in torchrun's gloo may find the address of a process that is dead
    store = dist.FileStore(str(checkpoint.with_name(f"store{restart}")), 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    rank = dist.get_rank()
    random.seed(7)  # states of generators are recorded
    np.random.seed(7)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(STEPS, 8, 4, generator=generator)
    with contextlib.ExitStack() as stack:
        session = None
        if len(sys.argv) > 3:
            session = stack.enter_context(
                Session(
                    model=model, optimizer=optimizer, out=sys.argv[3], overrides=UNPINNED, first_step=first
                )
            )
        for step in range(first, STEPS):
            if step == KEPT and rank == 0 and not checkpoint.exists():
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                    checkpoint,
                )
            if step == DEATH and rank == 1 and not restart and "HEALTHY" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = model(data[step]).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if session is not None:
                session.step(loss=loss.detach())
            with losses.with_suffix(f".{rank}").open("a") as file:
                file.write(f"{restart} {step} {loss.item():.17g}\n")
    dist.destroy_process_group()


main()
