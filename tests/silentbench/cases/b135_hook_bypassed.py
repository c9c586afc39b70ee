"""A fused dW bypasses the hook that says a gradient is ready.

The parameter is left out of the overlapped reduction.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.cases.b137_module_outside_ddp import OUTSIDE, PLACE
from silentbench.layouts import DP, FOUR

FUSED = {"gradient_accumulation_fusion": True}

CASE = case(
    "B135",
    "https://github.com/radixark/miles/issues/2723",
    healthy=DP.but(settings=FUSED),
    reference=FOUR.but(settings=FUSED),
    patches=OUTSIDE,
    answers=(
        by_compare(
            0,
            "reduce",
            PLACE,
            "parallel.replicas_differ reduce.value reduce.scaled reduce.own_fault",
            roles="reduced_grad",
        ),
        by_check(0, "reduce", PLACE, "parallel.replicas_differ reduce.not_the_sum"),
    ),
)
