"""Recording adds no collective to a step: what is called while training is what the training calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


def collectives(run: Any) -> Counter[str]:
    """Return which operations of process groups a function calls, below every wrapper in Python."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "c10d":
                found[function.__name__] += 1
            return function(*args, **(kwargs or {}))

    with Counting():
        run()
    return found


def test_steps_have_as_many_collectives_with_the_recorder_as_without(cpu_megatron, tmp_path):
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    def bare(steps: int) -> None:
        with CpuTrainer(TrainerSettings()) as trainer:
            for _ in range(steps):
                trainer.train_one_step()

    without = {steps: collectives(lambda steps=steps: bare(steps)) for steps in (1, 3)}
    recorded = {
        steps: collectives(
            lambda steps=steps: record_training(TrainerSettings(), tmp_path / f"run{steps}", steps=steps)
        )
        for steps in (1, 3)
    }
    assert (without[3] - without[1]).total() > 0
    assert recorded[3] - recorded[1] == without[3] - without[1]
