"""Real trainings over eight ranks, checked in parts: sharded optimizers, and faults that span stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_precision.engines import Resources
from mindspeed_precision.testing.celled import in_cells, in_memory, said
from mindspeed_precision.verify.cells.plan import plan

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

SCRIPT = Path(__file__).parents[1] / "verify" / "scripts" / "record_planted.py"
LAYOUT = {"tp": 2, "pp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("plant", "options", "ids"),
    [
        ("embedding_not_reduced", {}, {"reduce.not_the_sum"}),
        pytest.param("nothing", {"distributed_optimizer": True}, set(), marks=pytest.mark.long),
        pytest.param("norms_not_reduced", {"distributed_optimizer": True}, {"reduce.not_the_sum"}),
        pytest.param("copies_in_the_norm", {}, {"clip.norm_not_of_gradients"}, marks=pytest.mark.long),
    ],
)
def test_eight_ranks_say_in_parts_what_they_say_in_memory(megatron, tmp_path, plant, options, ids):
    from preloaded import run_training

    run = tmp_path / "run"
    arguments = [str(run), json.dumps({**LAYOUT, **options}), plant]
    run_training(SCRIPT, arguments, processes=8, megatron=megatron("0.17.1"), log=tmp_path / "log")
    whole, replica = in_memory(run), plan(run, range(8), Resources()).replica
    assert said(in_cells(run)) == said(in_cells(run, memory=replica)) == said(whole)
    assert {one.id for one in whole.findings} >= ids
    assert ids or not whole.findings
    exercised = {one.name: one.exercised for one in whole.outcomes}
    for law in ("reduce.not_the_sum", "clip.norm_not_of_gradients", "parallel.replicas_differ"):
        assert exercised[law], law
