"""Whether it is known how two runs cut a sequence over their context-parallel ranks.

The rules know one way, Megatron's; a packed sequence, or another implementation, is cut otherwise. So token
ids are asked: integers, which are equal where batches are, in their order or in another one.
"""

from __future__ import annotations

from collections import defaultdict

from mindspeed_precision.align.lanes import first_rank
from mindspeed_precision.align.places import of_module
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Digest, Phase, Place, Placement, RecordKey, Role, TensorRecord

_OTHER_CUT = (
    "the sequence is not cut as the rules say: over the context-parallel group token ids change order"
)
_NO_WITNESS = "no token ids were recorded that show how the sequence is cut over the context-parallel group"
_OF_IDS = ("int64", "int32")


def sequences_known(baseline: Run, candidate: Run, *, apart: bool) -> bool:
    """Tell whether both runs say where their parts of a sequence sit.

    Args:
        baseline: a run.
        candidate: another.
        apart: they cut it into other parts. Of equal parts it is enough that neither run says it.
    """
    known = [_says(run) for run in (baseline, candidate) if first_rank(run).coordinates.cp_size > 1]
    return all(known) or not (apart or any(known))


def _says(run: Run) -> bool:
    """Tell whether a run says it: recorded before there were rules, it says one place of all ranks."""
    places: dict[int, set[Place]] = defaultdict(set)
    for rank in run.ranks.values():
        held = (r.place for r in rank.records if isinstance(r.place, Placement) and of_module(r.key))
        places[rank.coordinates.cp_rank].update(held)
    return any(found != places[0] for found in places.values())


def doubt_of_order(baseline: Run, candidate: Run) -> str:
    """Return why tokens of two canonical runs may lie in another order; empty where ids show they do not.

    Args:
        baseline: put together.
        candidate: likewise.
    """
    if all(first_rank(run).coordinates.cp_size == 1 for run in (baseline, candidate)):
        return ""
    one, two = _token_ids(baseline), _token_ids(candidate)
    pairs = [(one[key], two[key]) for key in one.keys() & two.keys() if one[key].shape == two[key].shape]
    if not pairs:
        return _NO_WITNESS
    moved = any(_in_another_order(a.digest, b.digest) for a, b in pairs)
    return _OTHER_CUT if moved else ""


def _token_ids(run: Run) -> dict[tuple[int, RecordKey], TensorRecord]:
    return {
        (lane, record.key): record
        for lane, rank in run.ranks.items()
        for record in rank.records
        if (record.key.phase, record.key.role) == (Phase.FPROP, Role.INPUT) and record.dtype in _OF_IDS
    }


def _in_another_order(one: Digest, two: Digest) -> bool:
    return one.fingerprint != two.fingerprint and one.unordered == two.unordered
