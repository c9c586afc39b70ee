"""reduce_scatter ignores the strides of what it is given."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE, SP


def careless(wrapped, instance, args, kwargs):
    given, *rest = args
    return wrapped(given.transpose(0, 1).contiguous().view(given.shape), *rest, **kwargs)


PLACE = "embedding embedding.word_embeddings decoder.layers.0.self_attention.linear_proj"
CASE = case(
    "B128",
    "https://github.com/pytorch/pytorch/issues/130251",
    healthy=SP,
    reference=ONE,
    patches=(
        plant(
            "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
            careless,
            "(input_, group, input_split_sizes, use_global_buffer)",
            "a functional collective took a transposed input",
        ),
    ),
    answers=(
        by_compare(0, "fprop", PLACE, "fprop.value"),
        by_check(0, "fprop", PLACE, "fprop.not_of_its_inputs layout.collective_operand"),
    ),
)
