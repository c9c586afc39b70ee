"""A grouped product judges by strides that dY is transposed, and is wrong: dW of the experts."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import MIXTURE
from silentbench.plants import layer_built, linear_backward, misread


def marked(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    for expert in instance.mlp.experts.local_experts:
        expert.linear_fc1.weight.grouped = True


def careless(wrapped, instance, args, kwargs):
    grads = wrapped(*args, **kwargs)
    given, weight = args[0].saved_tensors
    if not hasattr(weight, "grouped"):
        return grads
    rows, columns = args[1].reshape(-1, args[1].shape[-1]), given.reshape(-1, given.shape[-1])
    return (grads[0], misread(rows).t().matmul(columns), *grads[2:])


CASE = case(
    "B094",
    "https://gitcode.com/Ascend/MindSpeed commit a899e95a (MR !560)",
    healthy=MIXTURE,
    patches=(
        layer_built(marked, "of experts alone"),
        linear_backward(careless, "transposition by strides"),
    ),
    answers=(
        by_compare(
            0,
            "wgrad",
            "decoder.layers.1.mlp.experts.*.linear_fc1*",
            "wgrad.operand_value wgrad.after_gemm wgrad.own_fault",
        ),
        by_check(
            0,
            "wgrad",
            "decoder.layers.*.mlp.experts.*.linear_fc1*",
            "wgrad.operand_not_received wgrad.not_the_product wgrad.changed_on_the_way",
        ),
    ),
)
