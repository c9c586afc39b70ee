"""The loss is a mean of the microbatches' means instead of the mean over tokens; their masks differ.

The logged loss is the same.
"""

from __future__ import annotations

from silentbench.case import Answer, case
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
        Answer(
            by=("compare",),
            step=0,
            phases=("dgrad", "loss"),
            fqn=("", "output_layer", "loss*"),
            ids=("loss.*", "dgrad.scaled", "fprop.loss"),
        ),
        Answer(
            by=("verify",),
            step=-1,
            phases=("init",),
            fqn=("*",),
            ids=("config.*",),
            says=("calculate_per_token_loss",),
        ),
    ),
)
