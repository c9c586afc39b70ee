"""A rare token gets a huge gradient of its embedding in low precision: here in the second step."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import model_built


def spike(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    seen = [0]

    def hook(grad):
        seen[0] += 1
        grad = grad.clone()
        if seen[0] == 3:  # two microbatches a step
            grad[101] *= 1e4
        return grad

    instance.embedding.word_embeddings.weight.register_hook(hook)


CASE = case(
    "B123",
    "Ascend practical case",
    healthy=ONE,
    patches=(model_built(spike, "the range of the type"),),
    answers=(
        by_compare(
            1,
            "wgrad",
            "embedding.word_embeddings.weight output_layer",
            "wgrad.value wgrad.after_gemm wgrad.operand_value wgrad.own_fault wgrad.scaled",
        ),
        by_check(
            1,
            "wgrad accumulate reduce clip",
            "embedding.word_embeddings.weight (model) grad_norm",
            "symptom.grad_norm_spike",
        ),
    ),
)
