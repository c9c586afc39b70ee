"""The loss is a mean of the microbatches' means instead of the mean over tokens; their masks differ.

The logged loss is the same.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import batches


def uneven_masks(wrapped, instance, args, kwargs):
    for number, batch in enumerate(wrapped(*args, **kwargs)):
        if number % 2:
            batch["loss_mask"][:, 8:] = 0
        yield batch


UNEVEN = ONE.but(patches=(batches(uneven_masks, "every second microbatch has a quarter of the tokens"),))

CASE = case(
    "B022",
    "https://github.com/huggingface/transformers/issues/34191",
    "https://github.com/huggingface/transformers/pull/35203",
    "https://unsloth.ai/blog/gradient",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 92df2ab5",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 3e3a5ab0",
    healthy=UNEVEN.but(settings={"transformer": {"calculate_per_token_loss": True}}),
    faulty=UNEVEN,
    answers=(
        by_compare(0, "dgrad loss", "(model) output_layer loss*", "loss.gradient_scaled"),
        by_verify("config.differs", "*", says="calculate_per_token_loss"),
        by_check(0, "dgrad loss", "(model) output_layer loss*", "loss.microbatches_weighted_unequally"),
    ),
)
