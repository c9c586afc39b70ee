"""Buffers of modules: copies are equal, and a router's bias is what the tokens of the step make of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from mindspeed_precision.records import INIT_STEP, PERSISTENT, Phase, RankCoordinates, Role, TensorRecord
from mindspeed_precision.verify.elements import Vector, rounded, roundoff
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.places import Found, in_execution_order
from mindspeed_precision.verify.recomputation.calls import calls_of, elements
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_stage, whole_run

_OWN = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of which each data-parallel rank has its own, by the definition of the module."""

_BIAS = "expert_bias"


def _persistent(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    for phase in (Phase.INIT, Phase.OPTIMIZER):
        for rank, record in facts.everywhere(phase, Role.BUFFER):
            if record.key.slot == PERSISTENT:
                yield rank, record


def _routed(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    """Yield the biases of routers, and the routing maps of those that have one."""
    layers: set[str] = set()
    for phase in (Phase.INIT, Phase.OPTIMIZER):
        for rank, record in facts.everywhere(phase, Role.BUFFER):
            layer, _, name = record.key.fqn.rpartition(".")
            if name == _BIAS:
                layers.add(layer)
                yield rank, record
    for rank, record in facts.everywhere(Phase.FPROP, Role.OUTPUT) if layers else ():
        if record.key.slot == "1" and record.key.fqn in layers:
            yield rank, record


@invariant(
    "buffers.copies_differ",
    holds="a buffer that a checkpoint holds once has the same bits on every rank that has a copy of it",
    unit="buffers with copies",
    span=[whole_run((Phase.INIT, Role.BUFFER), (Phase.OPTIMIZER, Role.BUFFER), keep=_persistent)],
)
def copies(facts: RunFacts) -> Answer:
    """Compare persistent buffers over data-parallel and context-parallel ranks; of routers over TP, too."""
    held: dict[tuple[object, ...], list[tuple[int, TensorRecord]]] = defaultdict(list)
    own = 0
    for phase in (Phase.INIT, Phase.OPTIMIZER):
        for rank, record in facts.everywhere(phase, Role.BUFFER):
            if record.key.slot != PERSISTENT:
                continue
            if record.key.fqn.rpartition(".")[2] in _OWN:
                own += 1
                continue
            held[_copy_of(facts.ranks[rank].coordinates, record)].append((rank, record))
    groups = [members for members in held.values() if len(members) > 1]
    failures: list[Failure] = []
    for members in groups:
        bits = {record.digest.fingerprint for _, record in members}
        if len(bits) > 1:
            first = in_execution_order(facts, [Found(rank=r, record=record) for r, record in members])[0]
            ranks = ", ".join(str(rank) for rank, _ in members)
            text = f"{len(bits)} different contents on ranks {ranks}"
            failures.append(failure(first.record, first.rank, text))
    alone = len(facts.coordinates) == 1
    return Answer(
        exercised=len(groups),
        findings=findings_of(
            failures,
            id="buffers.copies_differ",
            title="the copies of a buffer on different ranks differ: a checkpoint keeps one of them",
            remedy="reduce what it is computed from over all ranks that hold a copy, or broadcast it",
        ),
        failed=len(failures),
        applies=not alone,
        skipped=f"{own} running statistics, of which each rank has its own"
        if own
        else ("" if groups or alone else "no persistent buffer with copies was recorded"),
    )


def _copy_of(where: RankCoordinates, record: TensorRecord) -> tuple[object, ...]:
    """Return what ranks have in common that hold copies of one buffer."""
    key = record.key
    router = ".router." in f".{key.fqn}"
    expert = ".experts." in key.fqn
    return (
        key.step,
        key.phase,
        key.fqn,
        record.shape,
        None if router else where.tp_rank,
        where.ep_rank if expert else None,
    )


@invariant(
    "buffers.expert_bias_not_recomputed",
    holds="a router's bias begins at 0, and each step moves it by the rate, up for an expert with too few "
    "tokens and down for one that had too many, in float32",
    unit="biases",
    span=[
        each_stage(
            (Phase.INIT, Role.BUFFER),
            (Phase.OPTIMIZER, Role.BUFFER),
            (Phase.FPROP, Role.OUTPUT),
            keep=_routed,
        )
    ],
)
def expert_bias(facts: RunFacts) -> Answer:
    """Compute each router's bias after a step from that before it and from the step's routing maps."""
    config = facts.config.get("transformer_config") or {}
    rate = config.get("moe_router_bias_update_rate")
    failures: list[Failure] = []
    left: Counter[str] = Counter()
    exercised = 0
    for rank in facts.ranks:
        before: dict[str, TensorRecord] = {}
        for record in (
            *facts.of(rank, Phase.INIT, Role.BUFFER),
            *facts.of(rank, Phase.OPTIMIZER, Role.BUFFER),
        ):
            fqn = record.key.fqn
            if fqn.rpartition(".")[2] != _BIAS:
                continue
            earlier, before[fqn] = before.get(fqn), record
            found = _wrong(facts, rank, record, earlier, rate)
            if found is None:
                exercised += 1
            elif isinstance(found, Failure):
                exercised += 1
                failures.append(found)
            else:
                left[found] += 1
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="buffers.expert_bias_not_recomputed",
            title="a router's bias is not what the tokens of the steps make of it",
            remedy="what moves or casts it: a forward pass before the first step, a module that is cast to "
            "16 bits with its buffers, counts that are of other ranks or of another step",
        ),
        failed=len(failures),
        applies=bool(config.get("moe_router_enable_expert_bias")) or exercised > 0,
        skipped="; ".join(f"{count} {why}" for why, count in left.items()),
    )


def _wrong(
    facts: RunFacts, rank: int, record: TensorRecord, earlier: TensorRecord | None, rate: object
) -> Failure | str | None:
    """Return what is wrong with a bias; a text where that cannot be said; None: nothing is."""
    values = elements(facts, rank, record)
    if values is None:
        return "biases without elements"
    if record.key.step == INIT_STEP:
        began = facts.run.manifest.get("first_step")
        if began not in (None, 0) or _loaded(facts):
            return "biases of a training that goes on from a checkpoint"
        if not values.any():
            return None
        return failure(record, rank, f"it begins at {values.tolist()}", "it does not begin at 0")
    start = elements(facts, rank, earlier)
    if start is None or earlier is None or earlier.key.step not in (record.key.step - 1, INIT_STEP):
        return "biases of which the one before was not recorded"
    counts = _tokens(facts, rank, record)
    if isinstance(counts, str):
        return counts
    if not isinstance(rate, (int, float)):
        return "biases without a rate in the configuration"
    if roundoff(record.dtype) > roundoff("float32"):
        return failure(
            record, rank, "small updates are lost in its rounding", f"it is kept in {record.dtype}"
        )
    signs = np.sign(counts.mean() - counts)
    exact = start + rate * signs
    # Megatron multiplies the rate by signs in the type of the counts, which are cast with the model
    rates = [float(rate), *(float(rounded(np.array(rate), dtype)) for dtype in ("bfloat16", "float16"))]
    allowed = 2.0**-22 * (np.abs(start) + abs(rate))
    if any((np.abs(values - start - one * signs) <= allowed).all() for one in rates):
        return None
    made = f"{start.tolist()} and tokens {counts.astype(int).tolist()} make {exact.tolist()}"
    return failure(record, rank, f"it is {values.tolist()}; {made}")


def _loaded(facts: RunFacts) -> bool:
    args = facts.config.get("megatron_args") or {}
    return bool(args.get("load") or args.get("pretrained_checkpoint"))


def _tokens(facts: RunFacts, rank: int, record: TensorRecord) -> Vector | str:
    """Return how many tokens each expert got in the step, over all ranks and microbatches."""
    layer = record.key.fqn.rpartition(".")[0]
    where = facts.ranks[rank].coordinates
    config = facts.config.get("transformer_config") or {}
    scattered = bool(config.get("sequence_parallel"))
    total: Vector | None = None
    lanes = set()
    for other, held in facts.ranks.items():
        at = held.coordinates
        if at.pp_rank != where.pp_rank or (at.tp_rank and not scattered):
            continue
        lanes.add((at.dp_rank, at.cp_rank, at.tp_rank))
        calls = [
            call
            for call in calls_of(facts, other).values()
            if call.fqn == layer and call.step == record.key.step
        ]
        for call in calls:
            routes = elements(facts, other, call.outputs.get("1"))
            if routes is None or routes.ndim != 2:
                return "biases of which a routing map was not recorded with elements"
            mine = routes.sum(axis=0)
            total = mine if total is None else total + mine
    expected = where.dp_size * where.cp_size * (where.tp_size if scattered else 1)
    if total is None or len(lanes) != expected:
        return "biases of which not every rank's tokens were recorded"
    return total
