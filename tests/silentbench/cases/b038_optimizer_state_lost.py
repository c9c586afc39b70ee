"""The optimizer's moments and step counter are lost when a training is resumed: here, between steps 1 and 2.

Loss and norm of the first step after it are the same.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import training_step


def forget(wrapped, instance, args, kwargs):
    if instance.step == 2:
        for one in getattr(instance.optimizer, "chained_optimizers", [instance.optimizer]):
            one.optimizer.state.clear()
    return wrapped(*args, **kwargs)


CASE = case(
    "B038",
    "https://gitcode.com/Ascend/MindSpeed commit 3a6ca5b9",
    "https://github.com/NVIDIA/Megatron-LM/commit/ce8a8a736f",
    "https://github.com/NVIDIA/Megatron-LM/commit/9a45638758",
    "https://github.com/NVIDIA/Megatron-LM/issues/6920",
    healthy=ONE.but(steps=3),
    patches=(training_step(forget, "the optimizer's state was not restored"),),
    answers=(
        by_compare(2, "optimizer", "*", "optimizer.state optimizer.hyperparameter"),
        by_check(2, "optimizer", "*", "optimizer.state_reset optimizer.step_counter"),
    ),
)
