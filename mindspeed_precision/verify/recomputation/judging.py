"""A record against the numbers that it must hold."""

from __future__ import annotations

from mindspeed_precision.verify.failures import Failure, failure
from mindspeed_precision.verify.recomputation.calls import elements
from mindspeed_precision.verify.recomputation.exact import Exact, Left, distance
from mindspeed_precision.verify.run_facts import RunFacts


def against(facts: RunFacts, rank: int, one: Exact) -> Failure | Left | None:
    """Return what is wrong with a record; why it was not looked at; None: it is right.

    Args:
        facts: of the run.
        rank: whose record it is.
        one: what the record must hold.
    """
    found = elements(facts, rank, one.record)
    if found is None:
        return Left(what="records", why="without finite elements")
    off = distance(found, one)
    if off.ratio <= 1:
        return None
    kind = "" if off.factor is None else f"{off.factor:.4g} times that"
    return failure(one.record, rank, f"from {one.of}: {off.text}", kind)
