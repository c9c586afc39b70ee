"""The checks of one run."""

from __future__ import annotations

from mindspeed_precision.verify.registry import Checks
from mindspeed_precision.verify.run_facts import RunFacts

INVARIANTS: Checks[RunFacts] = Checks(spanned=True)
invariant = INVARIANTS.register
