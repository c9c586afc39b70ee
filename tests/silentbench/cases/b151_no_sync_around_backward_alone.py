"""no_sync was set for the backward alone.

What earlier microbatches left is not reduced (distributed optimizer).
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.cases.b142_only_the_last_microbatch_reduced import NO_SYNC
from silentbench.layouts import DISTOPT, FOUR

CASE = case(
    "B151",
    "build-nanogpt PR 30 (same fault reported for nanoGPT)",
    healthy=DISTOPT,
    reference=FOUR,
    patches=NO_SYNC,
    answers=(
        by_compare(
            0,
            "reduce",
            "*",
            "parallel.replicas_differ reduce.value reduce.scaled reduce.own_fault",
            roles="reduced_grad",
        ),
        by_check(0, "reduce", "*", "parallel.replicas_differ reduce.not_the_sum"),
    ),
)
