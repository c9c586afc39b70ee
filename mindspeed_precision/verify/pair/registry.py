"""The checks of two runs."""

from __future__ import annotations

from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Checks

PAIR: Checks[PairFacts] = Checks()
pair_check = PAIR.register
