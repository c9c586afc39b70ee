"""What a loss function reports beside the loss, and over which ranks it has already been summed.

Scripts of Megatron-LM until 0.12 all-reduce the report of each microbatch over the data-parallel ranks, the
loss itself not (``pretrain_gpt.py``, ``loss_func`` of core_v0.12.1). Such a number is of as many microbatches
of the batch as there are ranks, so that no number of a run with fewer ranks is the same.
"""

from __future__ import annotations

from collections import defaultdict

from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import NO_MICROBATCH, RecordKey, Role

SUMMED = "its report is summed over data-parallel ranks before it is returned"


def summed_reports(run: Run) -> frozenset[str]:
    """Return the names of reports that data-parallel ranks of a run have in common, though not their losses.

    A report of several numbers (``lm loss.0``, ``lm loss.1``) is one by its name, since a count of tokens is
    alike on every rank, summed or not.
    """
    seen: dict[str, dict[tuple[int, int], dict[str, set[int]]]] = {}
    several = any(rank.coordinates.dp_size > 1 for rank in run.ranks.values())
    for rank in run.ranks.values() if several else ():
        for record in rank.records:
            key = record.key
            if key.role is Role.LOSS and key.microbatch != NO_MICROBATCH:
                at = seen.setdefault(report_of(key), defaultdict(lambda: defaultdict(set)))
                at[key.step, key.microbatch][key.slot].add(record.digest.fingerprint)
    alike = {
        name
        for name, found in seen.items()
        if all(len(bits) == 1 for at in found.values() for bits in at.values())
    }
    return frozenset(alike - {""}) if "" in seen and "" not in alike else frozenset()


def report_of(key: RecordKey) -> str:
    """Return the name of the report that a record is of; empty for the loss that is differentiated."""
    return key.slot.partition(".")[0]
