"""Rows of zeros where mathematics has none: of an embedding, of a norm."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_precision.records import Finding, Phase, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.places import Found, in_execution_order, of_collective, seen_first
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank

_EMBEDDING = "word_embeddings"
_NORMS = ("norm", "layernorm", "ln")


@invariant(
    "fprop.zero_rows",
    holds="an embedding, and a norm, gives no row of zeros, unless it has such a row, or is given one",
    unit="outputs",
    span=[each_rank()],
)
def zero_rows(facts: RunFacts) -> Answer:
    """Count zeros: a row more of them than what the module has, and is given, accounts for."""
    looked, found = 0, []
    for rank in facts.ranks:
        for record, allowed in _outputs(facts, rank):
            looked += 1
            zeros = _zeros(record)
            if zeros is not None and _rows(zeros - allowed, record.shape[-1]):
                text = f"{zeros} zeros in {list(record.shape)}; {allowed} come from what it has and is given"
                found.append(Found(rank=rank, record=record, text=text))
    skipped = "" if looked else "no output of an embedding or a norm was recorded with statistics"
    if not found:
        return Answer(exercised=looked, skipped=skipped)
    first = in_execution_order(facts, found)[0]
    finding = Finding(
        id="fprop.zero_rows",
        severity=Severity.ERROR,
        confidence=0.9,
        title=f"{first.record.key.fqn} gives rows of zeros",
        evidence=(
            f"rank {first.rank}, {first.record.key.describe()}: {first.text}",
            f"{len(found)} of {looked} outputs",
        ),
        remedy="of an embedding: the range of the vocabulary that each rank takes for its own; of a norm: "
        "rows that the kernel leaves out at the end of a block",
        where=first.record.key,
    )
    return Answer(
        exercised=looked, failed=len(found), findings=(seen_first(first, facts, finding, count=len(found)),)
    )


def _rows(zeros: int, width: int) -> bool:
    """Tell whether zeros are those of whole rows, but for a few that rounding makes."""
    return zeros >= width and zeros % width <= width // 16


def _outputs(facts: RunFacts, rank: int) -> Iterator[tuple[TensorRecord, int]]:
    """Yield outputs of embeddings and norms, each with the zeros that are accounted for."""
    given = {
        (r.key.step, r.key.microbatch, r.key.fqn, r.key.occurrence): r
        for r in facts.of(rank, Phase.FPROP, Role.INPUT)
        if _is_row_wise(r.key.fqn) and not r.key.recomputed and not of_collective(r)
    }
    clean = _without_zeros(facts, rank)
    for record in facts.of(rank, Phase.FPROP, Role.OUTPUT, slot="0"):
        key = record.key
        if key.recomputed or not _is_row_wise(key.fqn) or len(record.shape) < 2 or key.fqn not in clean:
            continue
        source = given.get((key.step, key.microbatch, key.fqn, key.occurrence))
        if source is None or _zeros(record) is None:
            continue
        if key.fqn.endswith(_EMBEDDING):
            yield record, 0
        elif source.shape == record.shape and _zeros(source) is not None:
            yield record, _zeros(source) or 0


def _is_row_wise(fqn: str) -> bool:
    last = fqn.rpartition(".")[2]
    return last == _EMBEDDING or last.endswith(_NORMS)


def _without_zeros(facts: RunFacts, rank: int) -> frozenset[str]:
    """Return the modules whose weight never had a zero: a zero in what they give is no product of one."""
    zeros: dict[str, int] = {}
    for phase in (Phase.INIT, Phase.OPTIMIZER):
        for record in facts.of(rank, phase, Role.PARAM):
            owner, _, kind = record.key.fqn.rpartition(".")
            if kind == "weight" and _is_row_wise(owner):
                zeros[owner] = max(zeros.get(owner, 0), _zeros(record) or 0)
    return frozenset(owner for owner, count in zeros.items() if not count)


def _zeros(record: TensorRecord) -> int | None:
    return None if record.digest.statistics is None else record.digest.statistics.zeros
