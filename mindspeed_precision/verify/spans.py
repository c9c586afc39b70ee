"""Which ranks a law of ``check`` links, so that a run that memory does not hold is checked in parts.

Each law says so when it is registered. What it says is exact: asked of the parts, and put together, it gives
what it gives of the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import Kind, RunFacts

Reads = Callable[[RunFacts], Iterable[tuple[int, TensorRecord]]]
"""Records of some ranks that a law needs, each with its rank."""


class Span(Enum):
    """Ranks that are checked together; each includes the ones before it."""

    RANK = "rank"
    """Each by itself."""
    REPLICA = "replica"
    """Those of one data-parallel rank, over TP, PP and CP; where experts are distributed, of one EP group."""
    STAGE = "stage"
    """All of a pipeline stage, and of stages that share a parameter; other parameters may be apart."""
    RUN = "run"
    """All."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A law, or a part of it, and the ranks that it links.

    Attributes:
        span: these ranks.
        reads: records without which it would give something else; None: any.
        kinds: of what kinds these are.
        ask: that part of the law; None: the law itself.
        when: tells of a run whether this part is to be asked; None: always.
        effective: it reads what the ranks' objects held before the first step (``effective.json``).
    """

    span: Span
    reads: Reads | None = None
    kinds: frozenset[Kind] = frozenset()
    ask: Callable[[RunFacts], Answer] | None = None
    when: Callable[[RunFacts], bool] | None = None
    effective: bool = False


Ask = Callable[[RunFacts], Answer]
When = Callable[[RunFacts], bool]


def each_rank(ask: Ask | None = None) -> Part:
    """Return a part that looks at each rank by itself."""
    return Part(span=Span.RANK, ask=ask)


def each_replica(ask: Ask | None = None, *, when: When | None = None) -> Part:
    """Return a part that links the ranks of a replica."""
    return Part(span=Span.REPLICA, ask=ask, when=when)


def each_stage(*kinds: Kind, keep: Reads | None = None, ask: Ask | None = None) -> Part:
    """Return a part that links the ranks of a stage, and no parameter or module with another.

    Args:
        kinds: of the records that it reads.
        keep: which of them; None: all.
        ask: that part; None: the law itself.
    """
    return Part(span=Span.STAGE, kinds=frozenset(kinds), reads=keep or of_kinds(*kinds), ask=ask)


def whole_run(
    *kinds: Kind,
    keep: Reads | None = None,
    ask: Ask | None = None,
    when: When | None = None,
    effective: bool = False,
) -> Part:
    """Return a part that links all ranks.

    Args:
        kinds: of the records that it reads; may be none.
        keep: which records, of any kind; None: all of these kinds.
        ask: that part; None: the law itself.
        when: whether it is to be asked.
        effective: it reads ``effective.json``.
    """
    return Part(
        span=Span.RUN,
        kinds=frozenset(kinds),
        reads=keep or of_kinds(*kinds),
        ask=ask,
        when=when,
        effective=effective,
    )


def of_kinds(*kinds: Kind) -> Reads:
    """Return what reads all records of some kinds."""

    def reads(facts: RunFacts) -> Iterable[tuple[int, TensorRecord]]:
        for kind in kinds:
            yield from facts.everywhere(*kind)

    return reads


__all__ = ["Part", "Reads", "Span", "each_rank", "each_replica", "each_stage", "of_kinds", "whole_run"]
