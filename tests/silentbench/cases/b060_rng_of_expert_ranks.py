"""Random state is brought back wrongly on expert-parallel ranks: both have that of rank 0 after a resume.

Here after the first step. The data-parallel ranks then drop the same elements.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import MIXTURE
from silentbench.plants import trainer_built, training_step


def each_its_own(wrapped, instance, args, kwargs):
    import torch
    import torch.distributed as dist

    wrapped(*args, **kwargs)
    torch.manual_seed(instance.settings.seed + dist.get_rank())


def of_rank_0(wrapped, instance, args, kwargs):
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if instance.step == 1:
        tracker = get_cuda_rng_tracker()
        for name, state in sorted(tracker.get_states().items()):
            dist.broadcast(state, 0)
            tracker.states_[name] = state
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)
    return wrapped(*args, **kwargs)


CASE = case(
    "B060",
    "https://github.com/NVIDIA/Megatron-LM/issues/6858",
    healthy=MIXTURE.but(
        world=2,
        settings={"ep": 2, "dropout": 0.1},
        patches=(trainer_built(each_its_own, "data-parallel ranks drop other elements"),),
    ),
    patches=(training_step(of_rank_0, "the state was saved without the expert rank"),),
    answers=(
        by_compare(1, "batch", "*", "rng.state_differs", ranks=(1,)),
        by_compare(1, "fprop", "embedding.embedding_dropout", "fprop.value rng.state_differs", ranks=(1,)),
        by_check(1, "fprop", "embedding.embedding_dropout", "rng.became_equal"),
    ),
)
