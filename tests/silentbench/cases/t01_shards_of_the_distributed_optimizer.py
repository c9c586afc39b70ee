"""A trap: with the distributed optimizer a rank's main_grad is reduced in its own shard alone.

And that is right.
"""

from __future__ import annotations

from silentbench.case import case
from silentbench.layouts import DISTOPT, FOUR

CASE = case(
    "T01", "measured here", healthy=DISTOPT, faulty=DISTOPT.but(settings={"overlap": True}), reference=FOUR
)
