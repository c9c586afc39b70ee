"""One number for each microbatch of a step, whatever data-parallel rank has it.

Megatron's sampler gives microbatch m of data-parallel rank r, of n ranks, the samples that a run of one such
rank gives microbatch ``m * n + r``. Two runs of the same batch can so be compared microbatch by microbatch:
where their batches have the same bits, and not on trust.

Each microbatch's loss is divided by the number of microbatches of its rank before it is differentiated, so
that its gradients are larger by ``n_baseline / n_candidate`` where the candidate has fewer. They are
multiplied by that before they are compared. Over a context-parallel group gradients are averaged as over the
data-parallel one, while each rank has a part of every sample: their sum is as many times too large. With a
loss scale, or a loss by tokens, the factor is not known: then the forward pass alone is compared.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from mindspeed_precision.align.lanes import first_rank, setting
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import (
    INIT_STEP,
    NO_MICROBATCH,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
)

OTHER_BATCHES = "the batch is split otherwise over the data-parallel ranks"


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """How the microbatches of one run are numbered in the whole batch.

    Attributes:
        gradients: what a gradient before the reduction is multiplied by, so that it is as the other run's;
            None: that is not known.
        renumbered: a microbatch has another number than on its rank.
    """

    gradients: float | None
    renumbered: bool = True

    def key(self, key: RecordKey, where: RankCoordinates) -> RecordKey:
        """Return the key of a record of one microbatch with its number in the whole batch."""
        return replace(key, microbatch=_in_batch(key, where)) if self.renumbered else key

    def factor(self, key: RecordKey) -> float:
        """Return what a record is multiplied by: of a backward pass the factor, else 1."""
        return (self.gradients or 1.0) if _backward(key) else 1.0

    def knows(self, key: RecordKey) -> bool:
        """Tell whether a record can be made as the other run's."""
        return self.gradients is not None or not _backward(key)


def _backward(key: RecordKey) -> bool:
    early = key.phase in (Phase.DGRAD, Phase.ACCUMULATE)
    return early or (key.phase is Phase.WGRAD and key.role is not Role.INPUT)


def _in_batch(key: RecordKey, where: RankCoordinates) -> int:
    return key.microbatch * where.dp_size + where.dp_rank


def common_numbering(baseline: Run, candidate: Run) -> tuple[Numbering | None, Numbering | None]:
    """Return how two runs number the same microbatches of one batch; None: they are not known to have one."""
    mine, theirs = _microbatches(baseline), _microbatches(candidate)
    if mine is None or theirs is None:
        return None, None
    total, other = (
        count * first_rank(run).coordinates.dp_size for count, run in ((mine, baseline), (theirs, candidate))
    )
    one, two = _batches(baseline), _batches(candidate)
    common = {key[0] for key in one} & {key[0] for key in two}
    one, two = ({key: bits for key, bits in found.items() if key[0] in common} for found in (one, two))
    seen = {key[:2] for key in one}
    if not common or total != other or one != two or len(seen) != total * len(common):
        return None, None
    contexts = [first_rank(run).coordinates.cp_size for run in (baseline, candidate)]
    renumbered = first_rank(baseline).coordinates.dp_size != first_rank(candidate).coordinates.dp_size
    known = _only_averaged(baseline) and _only_averaged(candidate)
    factor = theirs / mine * contexts[0] / contexts[1] if known else None
    return (
        Numbering(gradients=1.0 if known else None, renumbered=renumbered),
        Numbering(gradients=factor, renumbered=renumbered),
    )


def sums_of_steps_known(
    baseline: Run, candidate: Run, numberings: tuple[Numbering | None, Numbering | None], *, apart: bool
) -> bool:
    """Tell whether a gradient that is summed over a step is the same sum in both runs, but for the factor.

    Args:
        baseline: a run.
        candidate: another.
        numberings: of their microbatches.
        apart: they split the batch or the sequence otherwise; else microbatches are alike.
    """
    if apart:
        return all(found is not None and found.gradients is not None for found in numberings)
    mine = _microbatches(baseline)
    return mine is not None and mine == _microbatches(candidate)


def _microbatches(run: Run) -> int | None:
    """Return how many microbatches a rank has in every step; None: not known."""
    found = {n for rank in run.ranks.values() for step, n in rank.microbatches.items() if step != INIT_STEP}
    return found.pop() if len(found) == 1 else None


def _only_averaged(run: Run) -> bool:
    """Tell whether the loss of a microbatch is divided by their number, and multiplied by nothing."""
    averaged = setting(run, "transformer_config", "calculate_per_token_loss") is False
    # a loss scale of its own, by rank's luck
    return averaged and setting(run, "transformer_config", "fp16") is False


def _batches(run: Run) -> dict[tuple[int, int, str], frozenset[int]]:
    """Return the bits of what each microbatch read, by step, number in the whole batch, and slot."""
    found: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    for rank in run.ranks.values():
        where = rank.coordinates
        for record in rank.records:
            key = record.key
            if key.role is Role.BATCH and key.microbatch != NO_MICROBATCH:
                found[key.step, _in_batch(key, where), key.slot].add(record.digest.fingerprint)
    return {key: frozenset(bits) for key, bits in found.items()}
