"""What differs in ``megatron.core`` between the versions that the tests train with: 0.12 to 0.19."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron import core
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_batch_on_this_cp_rank

VERSION = tuple(int(part) for part in core.__version__.split("rc")[0].split(".")[:2])


def virtual_stage(vp_stage: int | None) -> dict[str, int | None]:
    """Return the keyword that tells a model which virtual stage it is; until 0.12 a global says it."""
    if "vp_stage" in inspect.signature(GPTModel.__init__).parameters:
        return {"vp_stage": vp_stage}
    if vp_stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    return {}


def slice_for_context_parallelism(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the part of ``batch`` (``[b, s]`` each) that belongs to this context-parallel rank."""
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        # from 0.18 no group means the whole world
        group = parallel_state.get_context_parallel_group()
        return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group))
    return dict(get_batch_on_this_cp_rank(batch))


def loss_report(loss: Any, tokens: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return what a loss function gives back: the loss summed over tokens, their count, what is logged.

    Until 0.12 the script reduces the report itself, and the loss over the context-parallel group.

    Args:
        loss: scalar float32, the sum over this rank's tokens of the microbatch.
        tokens: scalar float32, how many they are.
    """
    both = torch.stack([loss, tokens])
    if VERSION >= (0, 13):
        return loss, tokens.detach().clone().to(torch.int), {"lm loss": both.detach().clone()}
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(both, group=parallel_state.get_context_parallel_group())
    report = both.detach().clone()
    torch.distributed.all_reduce(report, group=parallel_state.get_data_parallel_group())
    return both[0].clone(), both[1].detach().clone().to(torch.int), {"lm loss": (report[0], report[1])}


def step_loss(reports: list[dict[str, Any]]) -> float | None:
    """Return the mean loss per token of a step over all data- and context-parallel ranks.

    None on ranks that are not of the last pipeline stage.
    """
    if not reports:
        return None
    total = sum(torch.stack(list(report["lm loss"])) for report in reports)
    if VERSION >= (0, 13):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(total, group=group)
    return float(total[0] / total[1])
