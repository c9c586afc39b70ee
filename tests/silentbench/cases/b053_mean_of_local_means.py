"""The mean over context-parallel ranks is one of their means, however many tokens count on each."""

from __future__ import annotations

from silentbench.answers import MODEL, by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import batches


def uneven_masks(wrapped, instance, args, kwargs):
    for batch in wrapped(*args, **kwargs):
        batch["loss_mask"][:, :12] = 0  # the ranks hold quarters 0 and 3, and 1 and 2
        yield batch


MASKS = (batches(uneven_masks, "prompt tokens do not count"),)
PER_TOKEN = {"transformer": {"calculate_per_token_loss": True}}

CASE = case(
    "B053",
    "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    "https://github.com/NVIDIA/Megatron-LM/pull/7513",
    healthy=ONE.but(world=2, settings={"cp": 2, **PER_TOKEN}, patches=MASKS),
    faulty=ONE.but(world=2, settings={"cp": 2}, patches=MASKS),
    reference=ONE.but(patches=MASKS),
    twin_reference=ONE.but(settings=PER_TOKEN, patches=MASKS),
    answers=(
        by_compare(
            0,
            "loss dgrad reduce",
            f"{MODEL} output_layer",
            "loss.gradient_scaled loss.microbatches_weighted_unequally loss.not_of_token_losses "
            "dgrad.value dgrad.scaled reduce.value reduce.scaled reduce.own_fault",
        ),
        by_check(
            0,
            "loss dgrad",
            f"{MODEL} output_layer",
            "loss.gradient_scaled loss.microbatches_weighted_unequally loss.not_of_token_losses",
        ),
    ),
)
