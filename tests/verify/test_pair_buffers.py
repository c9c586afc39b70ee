"""Buffers of modules before the first step, in two runs."""

from __future__ import annotations

import numpy as np
import pytest
from run_building import RunBuilder, ranks

from mindspeed_precision.records import INIT_STEP, Severity
from mindspeed_precision.verify.verify import verify_runs

BIAS = "decoder.layers.0.mlp.router.expert_bias"
TABLE = "rotary_pos_emb.inv_freq"
ID = "weights.buffer_differs"


def run(directory, *, bias=None, dtype=np.float32, world=1, **sizes):
    """Two buffers on every rank; ``bias`` changes one of them on the last."""
    builder = RunBuilder(ranks(world, **sizes))
    for rank in range(world):
        value = np.arange(4).astype(dtype)
        if bias is not None and rank == world - 1:
            value = bias(value)
        builder.add("buffer", "init", BIAS, value, rank=rank, step=INIT_STEP)
        builder.add("buffer", "init", TABLE, np.ones(8, np.float32), rank=rank, step=INIT_STEP)
        builder.add("param", "init", "w", np.ones(4, np.float32), rank=rank, step=INIT_STEP)
        builder.add("loss", "loss", "loss", np.float32(1), rank=rank, slot="lm loss")
    return builder.write(directory)


def answer(one, two):
    said = verify_runs(one, two)
    found = [finding for finding in said.findings if finding.id == ID]
    return found, next(outcome for outcome in said.outcomes if outcome.name == ID)


@pytest.mark.parametrize("world", [1, 2])
def test_equal_buffers_are_looked_at_and_nothing_is_said(tmp_path, world):
    found, outcome = answer(run(tmp_path / "one", world=world), run(tmp_path / "two", world=world))
    assert found == []
    assert (outcome.exercised, outcome.failed) == (2 * world, 0)


def test_one_that_differs_is_named_with_its_rank(tmp_path):
    other = run(tmp_path / "two", world=2, bias=lambda value: value + np.float32(1e-3))
    (finding,), outcome = answer(run(tmp_path / "one", world=2), other)
    assert (finding.severity, finding.where.fqn) == (Severity.ERROR, BIAS)
    assert finding.evidence[0] == f"{BIAS}: rank 1, other bits"
    assert TABLE not in finding.title
    assert (outcome.exercised, outcome.failed) == (4, 1)


def test_another_dtype_is_said(tmp_path):
    (finding,), _ = answer(run(tmp_path / "one"), run(tmp_path / "two", dtype=np.float64))
    assert finding.evidence[0] == f"{BIAS}: rank 0, float32 and float64"


def test_a_rank_of_another_layout_may_have_another_part(tmp_path):
    other = run(tmp_path / "two", world=2, tp_size=2, bias=lambda value: value + np.float32(1))
    found, outcome = answer(run(tmp_path / "one"), other)
    assert found == []
    assert outcome.exercised == 0
    assert "the layouts differ" in outcome.skipped
