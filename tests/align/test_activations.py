"""What modules receive and return, put together from the ranks of a tensor-parallel group: by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.align import align
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.fingerprint import fingerprints
from mindspeed_precision.record.placement import TENSOR_GROUP, canonical_index, cut
from mindspeed_precision.record.sketch import ROUNDOFF, pack, sketch_values
from mindspeed_precision.record.statistics import statistics_of
from mindspeed_precision.records import (
    Digest,
    Part,
    Phase,
    Placement,
    RankCoordinates,
    RecordKey,
    Role,
    Side,
    Split,
    TensorRecord,
    Unplaced,
    Verdict,
)

SHAPE = (8, 2, 12)
WHOLE = Placement(shape=SHAPE)
INPUT = RecordKey(step=0, microbatch=0, phase=Phase.FPROP, fqn="m.fc", role=Role.INPUT, slot="0")
OUTPUT = replace(INPUT, role=Role.OUTPUT)
NEXT = replace(INPUT, fqn="m.next")


def values(seed):
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def half(dim, rank, size=2):
    held = SHAPE[dim] // size
    return Split(dim=dim, blocks=((rank * held, held),))


def tokens(rank):
    return Placement(shape=SHAPE, splits=(half(0, rank),))


def columns(rank):
    return Placement(shape=SHAPE, splits=(half(2, rank),))


def both(rank):  # of four ranks
    return Placement(shape=SHAPE, splits=(half(0, rank // 2), half(2, rank % 2)))


def gated(rank):
    return Placement(shape=SHAPE, splits=(Split(dim=2, blocks=((rank * 3, 3), (6 + rank * 3, 3))),))


def record(key, whole, place, *, local=None):
    """A rank's record of its part of ``whole``; ``local``: what it holds instead."""
    held = local
    if held is None:
        held = np.ascontiguousarray(cut(whole, place)) if isinstance(place, Placement) else whole
    index = None
    if isinstance(place, Placement) and not place.whole:
        index = canonical_index(Part(placement=place, start=0, stop=held.size))
    ordered, unordered = fingerprints(held.view(np.uint32), index=index)
    sketch = pack(sketch_values(held, index=index), roundoff=ROUNDOFF)
    digest = Digest(fingerprint=ordered, unordered=unordered, statistics=statistics_of(held), sketch=sketch)
    found = TensorRecord(
        seq=0, key=key, shape=held.shape, dtype=held.dtype.name, layout=None, digest=digest, place=place
    )
    return found, HostTensor(bits=held.view(np.uint32), dtype=held.dtype.name)


def write(path, ranks, *, keep=True, group="tp"):
    """Write one step of a run whose ranks are one tensor- or context-parallel group."""
    size = len(ranks)
    create_run(path, {"parallel": {"world_size": size}})
    for number, records in enumerate(ranks):
        where = RankCoordinates(
            rank=number, world_size=size, **{f"{group}_rank": number, f"{group}_size": size}
        )
        writer = RankWriter(path, coordinates=where)
        numbered = [replace(one, seq=seq) for seq, (one, _) in enumerate(records)]
        kept = {seq: host for seq, (_, host) in enumerate(records)} if keep else {}
        writer.write_step(0, numbered, kept, microbatches=1)
        writer.close(complete=True)
    return load_run(path)


def alone(*items):
    return [[record(key, whole, None) for key, whole in items]]


@pytest.mark.parametrize(
    ("place", "size"),
    [(tokens, 2), (columns, 2), (gated, 2), (both, 4)],
    ids=["tokens", "columns", "gated", "both"],
)
def test_shards_become_the_activation(place, size, tmp_path):
    whole = values(1)
    one = write(tmp_path / "one", alone((INPUT, values(0)), (OUTPUT, whole)))
    ranks = [[record(INPUT, values(0), WHOLE), record(OUTPUT, whole, place(rank))] for rank in range(size)]
    found = align(one, write(tmp_path / "two", ranks))
    assert (found.unruled, found.unmatched, found.replicas) == ({}, (), ())
    assert [p.key for p in found.pairs] == [INPUT, OUTPUT]
    for pair in found.pairs:
        assert pair.baseline.digest.same_bits(pair.candidate.digest)
        assert pair.candidate.shape == SHAPE
        assert pair.held_by[Side.CANDIDATE] == tuple(range(size))
    elements = found.candidate.ranks[0].payload(found.pairs[1].candidate)
    assert np.array_equal(elements.bits.view(np.float32), whole)


@pytest.mark.parametrize("keep", [True, False])
def test_a_wrong_shard_is_an_origin_and_what_reads_it_is_not(keep, tmp_path):
    first, second, third = values(0), values(1), values(2)
    one = write(tmp_path / "one", alone((INPUT, first), (OUTPUT, second), (NEXT, third)), keep=keep)
    ranks = []
    for rank in range(2):
        wrong = np.ascontiguousarray(cut(second, columns(rank))) * np.float32(1.001 if rank else 1)
        ranks.append(
            [
                record(INPUT, first, WHOLE),
                record(OUTPUT, second, columns(rank), local=wrong),
                record(NEXT, third * np.float32(1.001), tokens(rank)),
            ]
        )
    two = write(tmp_path / "two", ranks, keep=keep)
    diagnosis = compare_runs(one, two, policy="cross_layout", replay=False)
    assert [o.key for o in diagnosis.origins] == [OUTPUT]
    assert diagnosis.origins[0].propagated == 1


def test_each_copy_is_compared_where_copies_differ(tmp_path):
    """The second rank's copy is wrong, the first one's is right: it is found, and both ranks are named."""
    whole = values(1)
    one = write(tmp_path / "one", alone((INPUT, whole)))
    ranks = [[record(INPUT, whole, WHOLE)], [record(INPUT, whole, WHOLE, local=whole * np.float32(2))]]
    two = write(tmp_path / "two", ranks)
    found = align(one, two)
    assert [p.held_by[Side.CANDIDATE] for p in found.pairs] == [(0,), (1,)]
    diagnosis = compare_runs(one, two, policy="cross_layout", replay=False)
    assert [c.verdict for c in diagnosis.comparisons] == [Verdict.IDENTICAL, Verdict.DIVERGED]
    assert diagnosis.first_divergence.held_by == (1,)
    (finding,) = [f for f in diagnosis.findings if f.id == "parallel.replicas_differ"]
    assert "ranks 0 and ranks 1 hold different bits" in finding.evidence
    assert "all-reduce over the tensor-parallel group" in finding.remedy


def test_a_product_of_copies_that_differ_is_no_fault_of_its_own(tmp_path):
    """Each rank's dW is the product of its own operands, the whole one of none of the copies."""
    received, gradient = values(1)[:, 0], values(2)[:, 0]
    gemm = {role: replace(INPUT, phase=Phase.WGRAD, role=role, slot="") for role in (Role.INPUT, Role.WGRAD)}
    operand = replace(INPUT, phase=Phase.WGRAD, role=Role.GRAD_OUTPUT, slot="")

    def tensors(x, g):
        return [(INPUT, x), (gemm[Role.INPUT], x), (operand, g), (gemm[Role.WGRAD], g.T @ x)]

    one = write(tmp_path / "one", alone(*tensors(received, gradient)))
    ranks = []
    for rank in range(2):
        half = Split(dim=0, blocks=((rank * 6, 6),))
        places = {
            Role.WGRAD: Placement(shape=(12, 12), splits=(half,)),
            Role.GRAD_OUTPUT: Placement(shape=(8, 12), splits=(replace(half, dim=1),)),
            Role.INPUT: Placement(shape=(8, 12)),
        }
        mine = tensors(received * np.float32(1 + rank), gradient[:, rank * 6 : rank * 6 + 6])
        ranks.append(
            [record(key, None, places[key.role], local=np.ascontiguousarray(held)) for key, held in mine]
        )
    diagnosis = compare_runs(one, write(tmp_path / "two", ranks), policy="cross_layout", replay=False)
    assert {o.key for o in diagnosis.origins} == {INPUT}
    assert gemm[Role.WGRAD] in {c.key for c in diagnosis.comparisons if c.verdict is Verdict.DIVERGED}


@pytest.mark.parametrize("keep", [True, False])
def test_a_sum_over_the_group_is_added(keep, tmp_path):
    whole, first = values(1), values(2)
    one = write(tmp_path / "one", alone((INPUT, whole)), keep=keep)
    partial = Placement(shape=SHAPE, partial=TENSOR_GROUP)
    for name, second in (("right", whole - first), ("wrong", (whole - first) * np.float32(1.01))):
        ranks = [[record(INPUT, whole, partial, local=local)] for local in (first, second)]
        two = write(tmp_path / name, ranks, keep=keep)
        assert not align(one, two).replicas  # terms of a sum are no copies
        (judged,) = compare_runs(one, two, policy="cross_layout", replay=False).comparisons
        assert (judged.verdict is Verdict.DIVERGED) == (name == "wrong"), judged
        assert judged.verdict is not Verdict.MISSING


def test_a_sum_of_nothing_is_nothing(tmp_path):
    """As main_grad before the first microbatch: no sketch tells anything of it, and none has to."""
    nothing = np.zeros(SHAPE, np.float32)
    one = write(tmp_path / "one", alone((INPUT, nothing)), keep=False)
    partial = Placement(shape=SHAPE, partial=TENSOR_GROUP)
    two = write(tmp_path / "two", [[record(INPUT, nothing, partial)] for _ in range(2)], keep=False)
    (judged,) = compare_runs(one, two, policy="cross_layout", replay=False).comparisons
    assert judged.verdict is Verdict.IDENTICAL


def test_what_is_not_known_is_said_and_not_compared(tmp_path):
    whole = values(1)
    one = write(tmp_path / "one", alone((INPUT, whole), (OUTPUT, whole), (NEXT, whole)))
    lacking = replace(NEXT, phase=Phase.DGRAD, role=Role.GRAD_INPUT)
    ranks = [
        [
            record(INPUT, whole, Unplaced(reason="no layout rule for input[0] of Mystery")),
            record(OUTPUT, whole, None),
            record(NEXT, np.concatenate([whole, whole]), Placement(shape=(16, 2, 12))),
            *([record(lacking, whole, tokens(rank))] if rank else []),
        ]
        for rank in range(2)
    ]
    found = align(one, write(tmp_path / "two", ranks))
    assert found.pairs == ()
    assert found.unruled[INPUT] == "no layout rule for input[0] of Mystery"
    assert found.unruled[OUTPUT] == "no layout rule for output in fprop"
    assert found.unruled[NEXT].startswith("no layout rule by which both runs have one shape")
    assert found.unruled[lacking] == "not every rank that holds a part of it recorded it"


IDS = replace(INPUT, fqn="embedding.word_embeddings")


def zigzag(rank, *, said=True):
    """The chunks of one of two context-parallel ranks; ``said``: its run says where they are."""
    if not said:
        return Placement(shape=(4, *SHAPE[1:]))
    return Placement(shape=SHAPE, splits=(Split(dim=0, blocks=((rank * 2, 2), (6 - rank * 2, 2))),))


def context_ranks(whole, ids, *, ids_at=zigzag, said=True):
    """What two context-parallel ranks record of token ids and of a module's output."""
    ranks = []
    for rank in range(2):
        held = np.ascontiguousarray(cut(whole, zigzag(rank)))
        where = np.ascontiguousarray(cut(ids, ids_at(rank)))
        own = zigzag(rank, said=said)
        ranks.append([record(IDS, None, own, local=where), record(OUTPUT, None, own, local=held)])
    return ranks


def token_ids():
    return np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)


def test_the_chunks_of_context_parallel_ranks_become_the_sequence(tmp_path):
    whole = values(1)
    one = write(tmp_path / "one", alone((IDS, token_ids()), (OUTPUT, whole)))
    two = write(tmp_path / "two", context_ranks(whole, token_ids()), group="cp")
    found = align(one, two)
    assert (found.unruled, found.replicas) == ({}, ())
    assert [p.key for p in found.pairs] == [IDS, OUTPUT]
    assert all(p.baseline.digest.same_bits(p.candidate.digest) for p in found.pairs)
    elements = found.candidate.ranks[0].payload(found.pairs[1].candidate)
    assert np.array_equal(elements.bits.view(np.float32), whole)
    three = write(tmp_path / "three", context_ranks(whole * np.float32(1.001), token_ids()), group="cp")
    diagnosis = compare_runs(one, three, policy="cross_layout", replay=False)
    assert [o.key for o in diagnosis.origins] == [OUTPUT]


def halves(rank):
    return Placement(shape=SHAPE, splits=(half(0, rank),))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ids_at": halves}, "the sequence is not cut as the rules say"),
        ({"said": False}, "no layout rule for a sequence that is split over the context-parallel group"),
    ],
    ids=["cut otherwise", "recorded before there were rules"],
)
def test_a_sequence_in_another_order_is_said_and_not_compared(changes, reason, tmp_path):
    """Token ids are the witness: they would be equal, and are equal in another order."""
    whole = values(1)
    one = write(tmp_path / "one", alone((IDS, token_ids()), (OUTPUT, whole)))
    two = write(tmp_path / "two", context_ranks(whole, token_ids(), **changes), group="cp")
    found = align(one, two)
    assert (found.pairs, found.replicas) == ((), ())
    assert reason in found.unruled[OUTPUT]


def test_nothing_vouches_for_the_order_without_token_ids(tmp_path):
    whole = values(1)
    one = write(tmp_path / "one", alone((OUTPUT, whole)))
    ranks = [ranks[1:] for ranks in context_ranks(whole, token_ids())]
    found = align(one, write(tmp_path / "two", ranks, group="cp"))
    assert found.pairs == ()
    assert "no token ids were recorded" in found.unruled[OUTPUT]


def test_shards_in_each_others_place_differ(tmp_path):
    whole = values(1)
    one = write(tmp_path / "one", alone((INPUT, whole)))
    ranks = [[record(INPUT, np.roll(whole, 4, axis=0), tokens(rank))] for rank in range(2)]
    (pair,) = align(one, write(tmp_path / "two", ranks)).pairs
    assert not pair.baseline.digest.same_bits(pair.candidate.digest)
    assert pair.baseline.digest.unordered == pair.candidate.digest.unordered
