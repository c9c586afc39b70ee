"""A checkpoint was converted with another order of query, key and value: rows of linear_qkv are permuted."""

from __future__ import annotations

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import layer_built


def blocked(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    weight = instance.self_attention.linear_qkv.weight.data
    heads = instance.config.num_attention_heads
    rows = weight.view(heads, 3, -1, weight.shape[1])  # per head: query, key, value
    weight.copy_(rows.transpose(0, 1).reshape(weight.shape).clone())


CASE = case(
    "B026",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 620437ab",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit f0d60bfe",
    "https://github.com/vllm-project/vime/issues/274",
    healthy=ONE,
    patches=(layer_built(blocked, "the converter put all queries first, then all keys, then all values"),),
    answers=(
        by_compare(
            -1, "init", "decoder.layers.*.self_attention.linear_qkv.weight", "weights.initial_differs"
        ),
        by_verify("weights.permuted", "decoder.layers.*.self_attention.linear_qkv.weight"),
    ),
)
