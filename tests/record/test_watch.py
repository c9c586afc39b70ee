"""Warnings while training: what is told, by whom, and how often."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.encode import digest_text
from mindspeed_precision.record.statistics import digest_host, digest_number
from mindspeed_precision.record.watch import QUIET, Watch
from mindspeed_precision.records import Phase, RankCoordinates, RecordKey, Role


def number(step, value, *, role=Role.LOSS, phase=Phase.LOSS, slot="lm loss"):
    key = RecordKey(step=step, phase=phase, fqn=role.value, role=role, slot=slot)
    return key, digest_text(digest_number(value))


def norm(step, value):
    return number(step, value, role=Role.GRAD_NORM, phase=Phase.CLIP, slot="")


def tensor(step, values, *, phase=Phase.FPROP, role=Role.OUTPUT, fqn="layer", slot="0", statistics=True):
    host = HostTensor(bits=np.array(values, np.float32).view(np.uint32), dtype="float32")
    key = RecordKey(step=step, microbatch=0, phase=phase, fqn=fqn, role=role, slot=slot)
    return key, digest_text(digest_host(host, statistics=statistics))


def watched(steps, **where):
    """Return what is told of steps, each a list of records."""
    told: list[str] = []
    scaled = where.pop("scaled", False)
    watch = Watch(where=RankCoordinates(**where), scaled=scaled, tell=told.append)
    for step, seen in enumerate(steps):
        watch.end_step(step, seen)
    return told


def falling(count):
    return [[number(step, 5.0 - step / 10), norm(step, 1.0 + step % 3)] for step in range(count)]


def test_a_healthy_training_is_told_nothing_of():
    assert not watched([[*seen, tensor(0, [1, 2])] for seen in falling(40)])


def test_a_jump_of_the_loss_is_told_once():
    told = watched([*falling(20), [number(20, 30.0)], [number(21, 30.0)], *falling(3)])
    assert told == [
        "mindspeed-precision: warning: step 20, rank 0: the loss jumps: 30 at step 20; the median of the "
        "steps before is 3.85 [symptom.loss_spike]"
    ]


def test_a_kind_is_told_again_after_a_while():
    steps = [[number(step, 3.0)] for step in range(QUIET + 10)]
    told = watched(steps)
    assert len(told) == 2
    assert all("symptom.loss_constant" in line for line in told)


def test_a_jump_of_the_norm_is_told_by_the_first_rank_alone():
    steps = [*falling(10), [norm(10, 99.0)]]
    assert len(watched(steps)) == 1
    assert not watched(steps, rank=1, world_size=2, dp_rank=1, dp_size=2)
    assert not watched(steps, rank=1, world_size=2, pp_rank=1, pp_size=2)


def test_the_loss_is_told_by_the_last_stage_that_has_it():
    steps = [*falling(10), [number(10, 99.0)]]
    assert "rank 1" in watched(steps, rank=1, world_size=2, pp_rank=1, pp_size=2)[0]
    assert not watched(steps, rank=3, world_size=4, pp_rank=1, pp_size=2, tp_rank=1, tp_size=2)


NAN, INF = [1.0, np.nan], [np.inf, 1.0]


def test_a_nan_is_told_by_the_rank_where_it_arises():
    arises = [[tensor(0, [1, 2]), tensor(0, NAN, fqn="mlp"), tensor(0, NAN, fqn="next")]]
    told = watched(arises, rank=5, world_size=8, dp_rank=5, dp_size=8)
    assert told == [
        "mindspeed-precision: warning: step 0, rank 5: the first NaN or Inf: mlp output in fprop, "
        "microbatch 0 [nonfinite.first]"
    ]
    arrives = [[tensor(0, [1, 2]), tensor(0, NAN, phase=Phase.REDUCE, role=Role.REDUCED_GRAD)]]
    assert not watched(arrives)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_that_fp16_skips(scaled):
    gradient = tensor(0, INF, phase=Phase.DGRAD, role=Role.GRAD_OUTPUT)
    left = tensor(0, [1, 2], phase=Phase.OPTIMIZER, role=Role.PARAM)
    assert bool(watched([[gradient, left]], scaled=scaled)) == (not scaled)
    used = number(0, 0.1, role=Role.HYPERPARAMETER, phase=Phase.OPTIMIZER, slot="lr")
    assert watched([[gradient, left, used]], scaled=scaled)


def test_masks_and_records_without_statistics_are_left_alone():
    mask = tensor(0, INF, role=Role.INPUT, slot="attention_mask")
    assert not watched([[mask, tensor(0, NAN, statistics=False)]])
