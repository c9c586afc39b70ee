"""A mixture of experts: every expert gets the tokens that the router chose for it, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.elements import Vector
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.recomputation.calls import ModuleCall, calls_of, elements
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank

_ID = "fprop.tokens_misrouted"
_LAYERS = frozenset({"MoELayer"})


@invariant(
    _ID,
    holds="the rows that an expert receives are the tokens that the router chose for it",
    unit="experts",
    span=[each_rank()],
)
def routing(facts: RunFacts) -> Answer:
    """Compare the rows of each expert with the tokens of the routing map, whatever their order."""
    failures: list[Failure] = []
    left: Counter[str] = Counter()
    exercised, layers = 0, 0
    for rank in facts.ranks:
        for layer in calls_of(facts, rank).values():
            if layer.kind not in _LAYERS:
                continue
            layers += 1
            found = _of_layer(facts, rank, layer)
            if isinstance(found, str):
                left[found] += 1
                continue
            for expert, record, wrong, total in found:
                exercised += 1
                if wrong:
                    text = (
                        f"{wrong} of the {total} rows of expert {expert} are no token that was routed to it"
                    )
                    failures.append(failure(record, rank, text))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id=_ID,
            title="experts receive other tokens than the router chose",
            remedy="the dispatcher: the routing map or the counts that it permutes by (stale, of another "
            "layer or microbatch), the order of the all-to-all",
        ),
        failed=len(failures),
        skipped="; ".join(f"{count} layers {why}" for why, count in left.items()),
        applies=layers > 0,
    )


def _of_layer(
    facts: RunFacts, rank: int, layer: ModuleCall
) -> list[tuple[int, TensorRecord, int, int]] | str:
    """Return by expert the record, how many of its rows are wrong, and of how many; or why not."""
    where = facts.ranks[rank].coordinates
    config = facts.config.get("transformer_config") or {}
    if where.ep_size > 1 or where.tp_size > 1:
        return "whose tokens come from several ranks"
    if config.get("moe_expert_capacity_factor") or config.get("moe_input_jitter_eps"):
        return "that drop, pad or jitter tokens"
    calls = calls_of(facts, rank)
    router = calls.get((layer.step, layer.microbatch, f"{layer.fqn}.router", layer.occurrence))
    experts = calls.get((layer.step, layer.microbatch, f"{layer.fqn}.experts", layer.occurrence))
    if router is None or experts is None:
        return "of which router or experts were not recorded"
    tokens = elements(facts, rank, layer.received("0", "hidden_states"))
    routes = elements(facts, rank, router.outputs.get("1"))
    given, counts = experts.inputs.get("0"), elements(facts, rank, experts.inputs.get("1"))
    rows = elements(facts, rank, given)
    if tokens is None or routes is None or given is None or rows is None or counts is None:
        return "without elements of tokens, routes or what the experts receive"
    flat, chosen = tokens.reshape(-1, tokens.shape[-1]), routes.astype(bool)
    if chosen.ndim != 2 or len(chosen) != len(flat) or chosen.shape[1] != counts.size:
        return "whose routing map has another shape"
    if int(counts.sum()) > len(rows):
        return "whose counts are more than their rows"
    return list(_by_expert(flat, chosen, rows, counts.astype(int), given))


def _by_expert(
    tokens: Vector,
    chosen: NDArray[np.bool_],
    rows: Vector,
    counts: NDArray[np.int64],
    given: TensorRecord,
) -> Iterator[tuple[int, TensorRecord, int, int]]:
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        mine = Counter(row.tobytes() for row in rows[begin : begin + count])
        due = Counter(row.tobytes() for row in tokens[chosen[:, expert]])
        begin += count
        yield expert, given, max((mine - due).total(), (due - mine).total()), count
