"""What is drawn between two steps, from the real tracker of megatron-core."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]


@pytest.fixture
def watched(cpu_megatron):
    """Return a watch that has seen a step end, Megatron's tracker, and what draws from it with dropout."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mindspeed_precision.capture.between_steps import BetweenSteps

    tracker = get_cuda_rng_tracker()
    kept = tracker.get_states()
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    watch = BetweenSteps(rank=3)
    assert not watch.begin_step(0)
    watch.end_step()

    def forward(*, training):
        dropout = torch.nn.Dropout(0.5).train(training)
        with tracker.fork():
            dropout(torch.ones(8))

    yield watch, forward
    tracker.reset()
    tracker.set_states(kept)


def test_an_evaluation_in_eval_mode_draws_nothing(watched):
    watch, forward = watched
    forward(training=False)
    assert not watch.begin_step(1)


def test_an_evaluation_with_dropout_is_told_once(watched):
    watch, forward = watched
    forward(training=True)
    (finding,) = watch.begin_step(1)
    assert finding.id == "rng.moved_between_steps"
    assert finding.title == "model-parallel-rng was drawn from before step 1, outside training, on rank 3"
    watch.end_step()
    forward(training=True)
    assert not watch.begin_step(2)


def test_what_a_step_draws_is_its_own(watched):
    watch, forward = watched
    assert not watch.begin_step(1)
    forward(training=True)
    watch.end_step()
    assert not watch.begin_step(2)
