"""The backward of the embedding sums rows in another order each time."""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE


def any_order(wrapped, instance, args, kwargs):
    import os

    import torch

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, tokens):
            ctx.save_for_backward(tokens)
            ctx.rows = weight.shape[0]
            return weight[tokens]

        @staticmethod
        def backward(ctx, grad):
            (tokens,) = ctx.saved_tensors
            seed = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
            order = torch.randperm(tokens.numel(), generator=seed)
            flat = grad.reshape(-1, grad.shape[-1])
            zero = torch.zeros(ctx.rows, grad.shape[-1])
            return zero.index_add_(0, tokens.flatten()[order], flat[order]), None

    return Rows.apply(instance.weight, args[0])


CASE = case(
    "B081",
    "https://github.com/NVIDIA/Megatron-LM/commit/28802670f9",
    "https://github.com/NVIDIA/Megatron-LM/commit/bbc6dc11ec",
    "https://github.com/NVIDIA/Megatron-LM/commit/2ea54d6a37",
    "https://github.com/pytorch/pytorch/issues/51366",
    healthy=ONE.but(settings={"untie": True}),
    patches=(
        plant(
            "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
            any_order,
            "(self, input_)",
            "atomic additions",
        ),
    ),
    answers=(by_compare(0, "wgrad", "embedding.word_embeddings*", "wgrad.value determinism.not_repeated"),),
)
