"""A trap: rounding decides between experts of almost equal score, so that routes flip between layouts."""

from __future__ import annotations

from silentbench.case import case
from silentbench.layouts import MIXTURE

SPLIT = MIXTURE.but(world=2, settings={"tp": 2, "sequence_parallel": True}, steps=3)

CASE = case("T04", "measured here", healthy=SPLIT, faulty=SPLIT.but(repeat=1), reference=MIXTURE.but(steps=3))
