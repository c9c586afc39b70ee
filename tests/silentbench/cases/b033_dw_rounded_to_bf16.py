"""dW is rounded to bfloat16 before it is added to a float32 buffer.

The third digit of the norm, and a long drift.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import linear_backward


def rounded(wrapped, instance, args, kwargs):
    grads = wrapped(*args, **kwargs)
    return (grads[0], grads[1].bfloat16().float(), *grads[2:])


CASE = case(
    "B033",
    "https://github.com/NVIDIA/Megatron-LM/commit/e5542e85f2",
    "https://gitcode.com/Ascend/MindSpeed commit 5042e7a7",
    "https://gitcode.com/Ascend/MindSpeed commit e829d3b9",
    "https://gitcode.com/Ascend/MindSpeed commit 93ec0831",
    healthy=ONE,
    patches=(linear_backward(rounded, "the weight was saved without main_grad: dW came in bfloat16"),),
    answers=(
        by_compare(
            0,
            "wgrad",
            "output_layer* embedding.word_embeddings.weight decoder.layers.1.mlp.linear_fc2*",
            "wgrad.value wgrad.after_gemm",
            roles="wgrad",
        ),
        by_check(
            0,
            "wgrad",
            "output_layer* embedding.word_embeddings.weight decoder.layers.1.mlp.linear_fc2*",
            "wgrad.not_the_product wgrad.changed_on_the_way",
        ),
    ),
)
