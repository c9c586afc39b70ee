"""A dump of msprobe beside one of our runs: what both mean by the same name, and what only one can hold.

A dump knows neither the parallel layout nor how its layers are numbered over the whole model: both are taken
from the run beside it. What a dump can never hold (operands of dW, the optimizer) is no loss of the
comparison, and what our runs never hold (operations) is none either: both are counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_precision.align.compatible import numbers_text
from mindspeed_precision.align.match import Alignment
from mindspeed_precision.compare import Policy, load_policy
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.msprobe.checksums import without_raced
from mindspeed_precision.msprobe.numbering import numbers_of, renumbered
from mindspeed_precision.msprobe.parts import PART
from mindspeed_precision.msprobe.rank_records import OPERATION
from mindspeed_precision.msprobe.reader import is_dump
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.record.placement import canonical_index
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    Pair,
    Part,
    Phase,
    Placement,
    RecordKey,
    Role,
    Side,
    TensorRecord,
    Unmatched,
)

POLICY = "msprobe"
"""For a dump of msprobe and one of our runs."""

_PLACING = {
    "transformer_config": (
        "sequence_parallel",
        "virtual_pipeline_model_parallel_size",
        "num_moe_experts",
        "expert_tensor_parallel_size",
    ),
    "ddp_config": ("use_distributed_optimizer",),
}
"""Settings that place tensors over ranks: taken from the run beside a dump."""

_SAME = 0.01
"""A gradient that may be a part is judged where its extremes and norm are this close to the whole one's."""


def beside(baseline: Run, candidate: Run) -> tuple[Run, Run]:
    """Return two runs, a dump of msprobe with the layout, and the numbers of layers, of the run beside it.

    Raises:
        IncomparableError: the dump is of other ranks than the run.
    """
    if is_dump(baseline) and is_dump(candidate):
        if baseline.framework != candidate.framework:
            return _with_first_gradients(baseline), _with_first_gradients(candidate)
        return without_raced(baseline, candidate)
    if is_dump(baseline):
        return _adapted(baseline, candidate), candidate
    return (baseline, _adapted(candidate, baseline)) if is_dump(candidate) else (baseline, candidate)


def default_beside(baseline: Run, candidate: Run) -> Policy | None:
    """Return the policy for a dump of msprobe and one of our runs, of one framework; None: any other two."""
    if is_dump(baseline) == is_dump(candidate) or baseline.framework != candidate.framework:
        return None
    side = Side.BASELINE if is_dump(baseline) else Side.CANDIDATE
    return replace(load_policy(POLICY), why=f"taken because the {side.value} is a dump of msprobe")


def _with_first_gradients(dump: Run) -> Run:
    """Return a dump with what ``main_grad`` held after the first microbatch as dW of it, which it is.

    Of MindSpore msprobe has the gradient of each microbatch, of torch the sum so far.
    """
    ranks = {
        number: replace(rank, records=tuple(_as_first_gradient(record) for record in rank.records))
        for number, rank in dump.ranks.items()
    }
    return replace(dump, ranks=ranks)


def _as_first_gradient(record: TensorRecord) -> TensorRecord:
    key = record.key
    if key.phase is not Phase.ACCUMULATE or key.microbatch != 0:
        return record
    role = Role.BGRAD if key.fqn.endswith(".bias") else Role.WGRAD
    return replace(record, key=replace(key, phase=Phase.WGRAD, role=role, slot=""))


def _adapted(dump: Run, ours: Run) -> Run:
    if not dump.ranks.keys() <= ours.ranks.keys():
        raise IncomparableError(
            "the dump of msprobe is of other ranks, and what it holds of shards cannot be put together",
            where=f"{dump.path} and {ours.path}",
            found=f"ranks {numbers_text(sorted(dump.ranks))}",
            expected=f"of the run: {numbers_text(sorted(ours.ranks))}",
            remedy="record both with the same parallel layout, on the same ranks",
        )
    ranks = {number: _adapted_rank(rank, ours.ranks[number]) for number, rank in dump.ranks.items()}
    notes = list(dump.notes)
    operations = sum(len(rank.records) - len(ranks[n].records) for n, rank in dump.ranks.items())
    if operations:
        notes.append(f"{operations} records of operations (L1) not compared: our runs record modules, and dW")
    if ours.ranks[next(iter(dump.ranks))].coordinates.world_size > 1:
        notes.append("its parallel layout, and the numbers of its layers, are taken from the other run")
    config = {
        section: {name: value for name in names if (value := _setting(ours, section, name)) is not None}
        for section, names in _PLACING.items()
    }
    return replace(dump, ranks=ranks, notes=tuple(notes), manifest={**dump.manifest, "config": config})


def _setting(run: Run, section: str, name: str) -> Any:
    config = run.manifest.get("config")
    found = config.get(section) if isinstance(config, dict) else None
    return found.get(name) if isinstance(found, dict) else None


def _adapted_rank(rank: RankRecords, other: RankRecords) -> RankRecords:
    """Return a rank of a dump with global numbers, in the order of the other run, without declarations.

    The other run declares every parameter: what a dump saw of them says nothing more.
    """
    numbers = numbers_of(rank, other)
    known = {record.key: record for record in other.records}
    placements = {p.fqn: p.placement for p in other.parameters}
    records, at = [], -1
    for own in (record for record in rank.records if record.note != OPERATION):
        named = replace(own, key=replace(own.key, fqn=renumbered(own.key.fqn, numbers)))
        partner = known.get(named.key)
        at = partner.seq if partner is not None else at
        placed = partner is not None and named.payload is not None
        records.append((at, _placed(rank, named, partner, placements) if placed and partner else named))
    ordered = [record for _, record in sorted(records, key=lambda pair: pair[0])]
    return replace(
        rank,
        coordinates=other.coordinates,
        records=tuple(replace(record, seq=seq) for seq, record in enumerate(ordered)),
        parameters=(),
    )


def _placed(
    rank: RankRecords,
    record: TensorRecord,
    partner: TensorRecord,
    placements: Mapping[str, Placement | None],
) -> TensorRecord:
    """Number the elements of a shard as the other run does, so that the fingerprints speak of one thing."""
    part, placement = None, placements.get(record.key.fqn)
    if partner.part is not None and placement is not None:
        part = Part(placement=placement, start=partner.part[0], stop=partner.part[1])
    elif isinstance(partner.place, Placement) and not partner.place.whole:
        part = Part(placement=partner.place, start=0, stop=partner.numel)
    if part is None or partner.numel != record.numel:
        return record
    digest = digest_host(rank.payload(record), statistics=True, index=canonical_index(part))
    return replace(record, digest=digest, part=partner.part, place=partner.place)


def without_uncaptured(alignment: Alignment) -> Alignment:
    """Return an alignment of a dump and one of our runs without what one of them can never hold, counted."""
    one, two = is_dump(alignment.baseline), is_dump(alignment.candidate)
    if one == two:
        return alignment
    side = Side.BASELINE if one else Side.CANDIDATE
    dump = alignment.baseline if one else alignment.candidate
    pairs = [pair for pair in alignment.pairs if not _only_a_part(pair)]
    ours = alignment.candidate if one else alignment.baseline
    captured = _Captured(dump, alignment.ranks)
    watched = {r.key.fqn for n in alignment.ranks for r in ours.ranks[n].records if _at_gemm(r.key)}
    left, alone, gemms = [], Counter[str](), 0
    for unmatched in alignment.unmatched:
        if unmatched.side is not side and not captured.knows(unmatched.key):
            alone[f"{unmatched.key.phase.value}/{unmatched.key.role.value}"] += 1
        elif unmatched.side is side and _at_gemm(unmatched.key) and unmatched.key.fqn not in watched:
            gemms += 1
        else:
            left.append(unmatched)
    notes = _notes(alignment, side, left, len(alignment.pairs) - len(pairs), gemms, alone)
    return replace(alignment, pairs=tuple(pairs), unmatched=tuple(left), notes=(*alignment.notes, *notes))


class _Captured:
    """What msprobe saw: kinds of records, by name."""

    def __init__(self, dump: Run, ranks: Sequence[int]) -> None:
        self._places = {
            (key.phase, key.role, key.fqn, key.slot)
            for rank in ranks
            for key in (record.key for record in dump.ranks[rank].records)
        }
        self._kinds = {(phase, role, slot) for phase, role, _, slot in self._places}
        self._modules = {fqn for phase, _, fqn, _ in self._places if phase is Phase.FPROP}

    def knows(self, key: RecordKey) -> bool:
        """Tell whether the dump holds such a record elsewhere, or ought to: a parameter's gradient."""
        if (key.phase, key.role, key.fqn, key.slot) in self._places:
            return (
                key.phase is not Phase.OPTIMIZER
            )  # the next step shows it, and of the last one there is none
        owner = key.fqn.rpartition(".")[0]
        gradient = key.phase is Phase.ACCUMULATE and owner in self._modules
        return gradient and (key.phase, key.role, key.slot) in self._kinds


def _at_gemm(key: RecordKey) -> bool:
    """Tell whether a record is of dW at its GEMM or of an operand."""
    return key.phase is Phase.WGRAD and key.role in (Role.GRAD_OUTPUT, Role.INPUT, Role.WGRAD)


def _only_a_part(pair: Pair) -> bool:
    """Tell whether a gradient of msprobe's is but a part of ours: it may be one, and is another number."""
    if PART not in (pair.baseline.note, pair.candidate.note):
        return False
    one, two = pair.baseline.digest.statistics, pair.candidate.digest.statistics
    if one is None or two is None:
        return True
    room = max(_SAME, 8 * UNIT_ROUNDOFF.get(pair.candidate.dtype, 0.0))
    sides = ((one.l2_norm, two.l2_norm), (one.maximum, two.maximum), (one.minimum, two.minimum))
    size = max(abs(one.maximum), abs(one.minimum), 1e-300)
    scales = (max(one.l2_norm, 1e-300), size, size)
    return not all(
        math.isclose(a, b, rel_tol=0, abs_tol=room * scale)
        for (a, b), scale in zip(sides, scales, strict=True)
    )


def _notes(
    alignment: Alignment,
    side: Side,
    left: Sequence[Unmatched],
    parts: int,
    gemms: int,
    alone: Mapping[str, int],
) -> list[str]:
    """Say how much of the dump was aligned, and what of either run was not looked at."""
    lost = sum(unmatched.side is side for unmatched in left)
    total = len(alignment.pairs) + lost
    share = 100 * len(alignment.pairs) / total if total else 0.0
    where = f"msprobe, in the {side.value}"
    notes = [
        f"{where}: {len(alignment.pairs)} of {total} records of modules and parameters aligned "
        f"({share:.1f} %)"
    ]
    if parts:
        notes.append(
            f"{where}: {parts} aligned gradients not judged: they are the part that flows through one module "
            "of a tensor that others read, too, and the other run recorded the whole"
        )
    if gemms:
        notes.append(
            f"{where}: {gemms} records of dW at products that the other run does not watch: not compared"
        )
    if alone:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(alone).most_common())
        notes.append(f"{where}: not captured by msprobe, so not compared: {kinds}")
    if not alignment.pairs:
        notes.append(f"{where}: nothing to compare with our runs: dump with level L0 or mix")
    return notes
