"""The loss of one run: what token losses, masks and the normaliser give. Each fault has its healthy twin."""

from __future__ import annotations

import numpy as np
import pytest
from run_building import RunBuilder, findings_of, outcome_of, ranks

LOSSES = np.array([[2.0, 1.0, 4.0, 3.0], [1.0, 1.0, 2.0, 2.0]], np.float32)


def trained(
    directory,
    *,
    microbatches=2,
    masks=None,
    factor=1.0,
    per_token=False,
    offset=0.0,
    step_loss=None,
    keep=False,
    coordinates=None,
    dtype="float32",
    mean_form=False,
    initial=None,
):
    """One step as Megatron's schedule makes it: the loss function gives a sum and the tokens of a microbatch.

    ``factor`` is what the schedule multiplies by and should not, ``offset`` what the loss function adds.
    ``initial`` is the loss scale with which a training begins that loads nothing.
    """
    scaler = {"loss_scale": None, "initial_loss_scale": initial, "loss_scale_window": 1000}
    known = {} if initial is None else {"config": {"optimizer_config": scaler}, "manifest": {"first_step": 0}}
    builder = RunBuilder(coordinates, keep=keep, microbatches=microbatches, dtype=dtype, **known)
    sums, counts = [], []
    for rank in range(len(builder.coordinates)):
        for microbatch in range(microbatches):
            mask = np.ones((2, 4), np.float32) if masks is None else masks[microbatch]
            losses = LOSSES + microbatch + rank
            total, tokens = (losses * mask).sum(dtype=np.float32), np.int32(mask.sum())
            at = {"rank": rank, "microbatch": microbatch}
            builder.add("batch", "batch", "batch", mask, slot="loss_mask", **at)
            builder.add("output", "fprop", "", losses, slot="0", **at)
            value = total + np.float32(offset)
            if mean_form:
                builder.add("loss", "loss", "loss", np.float32(value / tokens), **at)
            else:
                builder.add("loss", "loss", "loss", np.float32(value), **at)
                builder.add("loss", "loss", "loss", tokens, slot="1", **at)
            scale = 1.0 if per_token else 1.0 / (tokens * microbatches)
            builder.add(
                "grad_output", "dgrad", "", (mask * factor * scale).astype(np.float32), slot="0", **at
            )
            sums.append(float(value))
            counts.append(int(tokens))
    logged = sum(sums) / sum(counts) if step_loss is None else step_loss
    builder.add("loss", "loss", "loss", np.float64(logged), slot="lm loss")
    return builder.write(directory)


IDS = (
    "loss.not_of_token_losses",
    "loss.gradient_scaled",
    "loss.microbatches_weighted_unequally",
    "loss.step_not_the_mean",
)
UNEVEN = (np.ones((2, 4), np.float32), np.array([[1, 1, 1, 1], [0, 0, 0, 0]], np.float32))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mean_form": True},
        {"per_token": True, "masks": UNEVEN, "keep": True},
        {"coordinates": ranks(2)},
        {"factor": 1024.0, "dtype": "float16"},
        {"factor": 1024.0, "dtype": "float16", "initial": 1024.0},
        {"factor": 1.0, "dtype": "float16"},
        {"factor": 1.0, "initial": 2.0**32},
        {"microbatches": 1},
    ],
    ids=[
        "sum",
        "mean",
        "per token",
        "two ranks",
        "fp16 with a loss scale",
        "fp16 with a known loss scale",
        "fp16 of which the scale is not known",
        "no fp16, no scale",
        "one microbatch",
    ],
)
def test_nothing_is_found_in_a_healthy_loss(tmp_path, settings):
    run = trained(tmp_path / "run", **settings)
    assert not findings_of(run, *IDS)
    assert outcome_of(run, "loss.not_of_token_losses").exercised
    assert outcome_of(run, "loss.gradient_scaled").exercised
    assert outcome_of(run, "loss.step_not_the_mean").exercised


def test_a_loss_that_something_is_added_to(tmp_path):
    found = findings_of(trained(tmp_path / "run", offset=0.7), *IDS)
    finding = found["loss.not_of_token_losses"]
    assert (finding.where.step, finding.where.microbatch) == (0, 0)
    assert "16.7" in finding.evidence[0]


def test_a_masked_loss_is_judged_from_elements(tmp_path):
    masks = (UNEVEN[1], UNEVEN[1])
    assert not findings_of(trained(tmp_path / "healthy", masks=masks, keep=True), *IDS)
    assert "loss.not_of_token_losses" in findings_of(
        trained(tmp_path / "faulty", masks=masks, keep=True, offset=0.5), *IDS
    )
    without = trained(tmp_path / "without", masks=masks, offset=0.5)
    assert "elements" in outcome_of(without, "loss.not_of_token_losses").skipped


@pytest.mark.parametrize("factor", [2.0, 0.5, 4.0])
def test_a_loss_that_is_not_divided(tmp_path, factor):
    found = findings_of(trained(tmp_path / "run", factor=factor), *IDS)
    assert set(found) == {"loss.gradient_scaled"}
    assert f"{factor:g} times 1 / (tokens x microbatches)" in found["loss.gradient_scaled"].evidence[0]
    assert found["loss.gradient_scaled"].where.phase.value == "dgrad"


def test_a_loss_that_is_not_scaled(tmp_path):
    """In float16 its gradients vanish, and are divided by the scale all the same."""
    finding = findings_of(trained(tmp_path / "run", dtype="float16", initial=1024.0), *IDS)[
        "loss.gradient_scaled"
    ]
    assert finding.where.step == 0


def test_a_mean_of_means_over_uneven_microbatches(tmp_path):
    found = findings_of(trained(tmp_path / "run", masks=UNEVEN, keep=True), *IDS)
    assert set(found) == {"loss.microbatches_weighted_unequally"}
    assert found["loss.microbatches_weighted_unequally"].severity.value == "warning"
    assert "4 to 8 tokens" in found["loss.microbatches_weighted_unequally"].evidence[0]


def test_a_step_loss_that_is_no_mean(tmp_path):
    found = findings_of(trained(tmp_path / "run", step_loss=5.0), *IDS)
    assert set(found) == {"loss.step_not_the_mean"}
    assert "logged 5" in found["loss.step_not_the_mean"].evidence[0]


def test_a_step_of_which_ranks_are_missing_is_not_judged(tmp_path):
    run = trained(tmp_path / "run", coordinates=ranks(2)[:1], step_loss=5.0)
    assert not findings_of(run, *IDS)
    assert outcome_of(run, "loss.step_not_the_mean").skipped
