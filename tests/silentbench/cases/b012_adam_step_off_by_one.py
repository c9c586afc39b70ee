"""Adam's step counter is one too high, so that its bias correction is wrong from the first update on.

All of the forward and backward of the first step agree.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import adam_state


def one_too_high(wrapped, instance, args, kwargs):
    group = args[0]
    new = [p for p in group["params"] if p.grad is not None and not instance.state[p]]
    result = wrapped(*args, **kwargs)
    for parameter in new:
        instance.state[parameter]["step"] += 1  # the list of the caller holds the same tensor
    return result


CASE = case(
    "B012",
    "https://gitcode.com/Ascend/MindSpeed commit 199d9455 (MR !2651)",
    healthy=ONE,
    patches=(adam_state(one_too_high, "npu_apply_fused_adamw_v2 got state_step instead of state_step - 1"),),
    answers=(
        by_compare(0, "optimizer", "*", "optimizer.hyperparameter optimizer.update", says="step"),
        by_check(0, "optimizer", "*", "optimizer.step_counter"),
    ),
    quick=True,
)
