"""The operands of an expert's dW are swapped: it is the transpose of what it should be."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import MIXTURE
from silentbench.plants import layer_built, linear_backward


def marked(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    for expert in instance.mlp.experts.local_experts:
        expert.linear_fc2.weight.swapped = True


def swapped(wrapped, instance, args, kwargs):
    grads = wrapped(*args, **kwargs)
    weight = args[0].saved_tensors[1]
    return (grads[0], grads[1].t().contiguous(), *grads[2:]) if hasattr(weight, "swapped") else grads


CASE = case(
    "B107",
    "https://gitcode.com/Ascend/MindSpeed commit 567cd9ce",
    healthy=MIXTURE.but(settings={"transformer": {"ffn_hidden_size": 32}}),
    patches=(
        layer_built(marked, "of experts alone"),
        linear_backward(swapped, "gmm_backward_fusion took the other operator"),
    ),
    answers=(
        by_compare(
            0,
            "wgrad",
            "decoder.layers.1.mlp.experts.*.linear_fc2*",
            "wgrad.value wgrad.after_gemm wgrad.operand_value wgrad.own_fault wgrad.scaled",
        ),
        by_check(
            0,
            "wgrad",
            "decoder.layers.*.mlp.experts.*.linear_fc2*",
            "wgrad.not_the_product wgrad.changed_on_the_way",
        ),
    ),
)
