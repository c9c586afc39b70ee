"""The shard algebra on runs written by hand: what adds up, what is refused, what is said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.align import align
from mindspeed_precision.align.lanes import Lanes, layouts_differ
from mindspeed_precision.align.layout import canonical
from mindspeed_precision.align.state import RecordedStates
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.errors import ConfigError, IncomparableError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.fingerprint import fingerprints
from mindspeed_precision.record.placement import TENSOR_GROUP, canonical_index, cut
from mindspeed_precision.record.sketch import ROUNDOFF, pack, sketch_values
from mindspeed_precision.record.statistics import statistics_of
from mindspeed_precision.records import (
    INIT_STEP,
    NO_MICROBATCH,
    Digest,
    ParameterDeclaration,
    Part,
    Phase,
    Placement,
    RankCoordinates,
    RecordKey,
    Role,
    Side,
    Split,
    TensorRecord,
    Verdict,
)

WEIGHT, NORM, HEAD = "mlp.linear_fc1.weight", "norm.weight", "output_layer.weight"
SHAPE = (8, 3)
STEPS = (INIT_STEP, 0)
REDUCED = (Phase.REDUCE, Role.REDUCED_GRAD)
PARAM = (Phase.INIT, Role.PARAM)


def tensor(name, kind, seed=0):
    shape = SHAPE if name != NORM else (5,)
    names = (WEIGHT, NORM, HEAD)
    kinds = (PARAM, (Phase.WGRAD, Role.WGRAD), REDUCED, (Phase.OPTIMIZER, Role.EXP_AVG))
    generator = np.random.default_rng([seed, names.index(name), kinds.index(kind)])
    return generator.normal(size=shape).astype(np.float32)


def split(rank, size, stride=1, shape=SHAPE):
    held = shape[0] // size // stride
    blocks = tuple(((piece * size + rank) * held, held) for piece in range(stride))
    return Placement(shape=shape, splits=(Split(dim=0, blocks=blocks),))


class Rank:
    """One rank of a run, written record by record."""

    def __init__(self, coordinates, placements):
        self.coordinates, self.placements = coordinates, placements
        self.steps = {step: [] for step in STEPS}
        self.payloads = {step: [] for step in STEPS}

    def add(self, name, kind, value=None, *, elements=None, placed=True, keep=True, sketched=True):
        phase, role = kind
        placement = self.placements[name]
        whole = tensor(name, kind) if value is None else value
        start, stop = elements or (0, placement.local_numel)
        part = Part(placement=placement, start=start, stop=stop)
        local = np.ascontiguousarray(cut(whole, placement))
        held = local if elements is None else local.reshape(-1)[start:stop]
        index = canonical_index(part) if placed and not part.whole else None
        step = INIT_STEP if phase is Phase.INIT else 0
        key = RecordKey(
            step=step,
            microbatch=0 if phase in (Phase.WGRAD, Phase.ACCUMULATE) else NO_MICROBATCH,
            phase=phase,
            fqn=name,
            role=role,
            slot=f"{start}:{stop}" if elements else "after" if phase is Phase.ACCUMULATE else "",
        )
        ordered, unordered = fingerprints(held.view(np.uint32), index=index)
        sketch = pack(sketch_values(held, index=index), roundoff=ROUNDOFF) if sketched else None
        statistics = statistics_of(held)
        digest = Digest(fingerprint=ordered, unordered=unordered, statistics=statistics, sketch=sketch)
        record = TensorRecord(
            seq=0,
            key=key,
            shape=held.shape,
            dtype="float32",
            layout=None,
            digest=digest,
            part=None if index is None else (start, stop),
        )
        self.steps[step].append(record)
        self.payloads[step].append(HostTensor(bits=held.view(np.uint32), dtype="float32") if keep else None)
        return self

    def write(self, directory):
        writer = RankWriter(directory, coordinates=self.coordinates)
        writer.declare_parameters(
            [
                ParameterDeclaration(
                    fqn=name,
                    shape=placement.local_shape if placement else SHAPE,
                    dtype="float32",
                    trainable=True,
                    placement=placement,
                )
                for name, placement in self.placements.items()
            ]
        )
        seq = 0
        for step in STEPS:
            records = [replace(r, seq=seq + n) for n, r in enumerate(self.steps[step])]
            kept = {r.seq: p for r, p in zip(records, self.payloads[step], strict=True) if p is not None}
            writer.write_step(step, records, kept, microbatches=max(step, 0) and 1)
            seq += len(records)
        writer.close(complete=True)


def write(directory, ranks):
    create_run(directory, {"parallel": ranks[0].coordinates.sizes()})
    for rank in ranks:
        rank.write(directory)
    return load_run(directory)


def ranks_of(tp=1, dp=1, stride=1, **changes):
    return [
        Rank(
            RankCoordinates(
                rank=d * tp + t,
                world_size=tp * dp,
                tp_rank=t,
                tp_size=tp,
                dp_rank=d,
                dp_size=dp,
            ),
            {WEIGHT: split(t, tp, stride), NORM: Placement(shape=(5,)), **changes},
        )
        for d in range(dp)
        for t in range(tp)
    ]


def filled(ranks):
    for rank in ranks:
        for name in (WEIGHT, NORM):
            for kind in (PARAM, REDUCED):
                rank.add(name, kind)
    return ranks


def pairs_of(alignment):
    return {(p.key.fqn, p.key.role): p for p in alignment.pairs}


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_shards_and_replicas_become_the_tensor(tp, dp, stride, tmp_path):
    one = write(tmp_path / "one", filled(ranks_of()))
    two = write(tmp_path / "two", filled(ranks_of(tp, dp, stride)))
    assert layouts_differ(one, two)
    alignment = align(one, two)
    assert (alignment.unmatched, dict(alignment.unruled), alignment.replicas) == ((), {}, ())
    pairs = pairs_of(alignment)
    assert set(pairs) == {(n, r) for n in (WEIGHT, NORM) for r in (Role.PARAM, Role.REDUCED_GRAD)}
    for pair in pairs.values():
        assert pair.baseline.digest.fingerprint == pair.candidate.digest.fingerprint
        assert pair.baseline.shape == pair.candidate.shape
        assert pair.held_by[Side.CANDIDATE] == tuple(range(tp * dp))
        assert pair.held_by[Side.BASELINE] == (0,)
    weight = pairs[WEIGHT, Role.REDUCED_GRAD].candidate
    elements = alignment.candidate.ranks[0].payload(weight)
    assert np.array_equal(elements.bits.view(np.float32), tensor(WEIGHT, REDUCED))


def test_ranges_of_a_distributed_optimizer_become_the_tensor(tmp_path):
    ranks = ranks_of(tp=2, dp=2)
    for rank in ranks:
        ranges = ((0, 5), (5, 12))[rank.coordinates.dp_rank]
        rank.add(WEIGHT, REDUCED, elements=ranges)
    whole = ranks_of(dp=2)
    for rank in whole:
        rank.add(WEIGHT, REDUCED)
    alignment = align(write(tmp_path / "one", whole), write(tmp_path / "two", ranks))
    (pair,) = alignment.pairs
    assert pair.key.slot == ""
    assert pair.baseline.digest.fingerprint == pair.candidate.digest.fingerprint
    elements = alignment.candidate.ranks[0].payload(pair.candidate)
    assert np.array_equal(elements.bits.view(np.float32), tensor(WEIGHT, REDUCED))


def test_shards_in_each_others_place_differ(tmp_path):
    """The candidate's ranks hold each other's shard: every element is there, none where it belongs."""
    swapped = ranks_of(tp=2)
    wrong = np.roll(tensor(WEIGHT, REDUCED), 4, axis=0)
    for rank in filled(swapped):
        rank.steps[0], rank.payloads[0] = [], []
        rank.add(WEIGHT, REDUCED, wrong)
    alignment = align(
        write(tmp_path / "one", [r.add(WEIGHT, REDUCED) for r in ranks_of()]),
        write(tmp_path / "two", swapped),
    )
    pair = pairs_of(alignment)[WEIGHT, Role.REDUCED_GRAD]
    assert pair.baseline.digest.fingerprint != pair.candidate.digest.fingerprint
    assert pair.baseline.digest.unordered == pair.candidate.digest.unordered


def test_a_shard_that_is_not_there_is_no_tensor(tmp_path):
    ranks = filled(ranks_of(tp=2))
    del ranks[1].steps[0][0], ranks[1].payloads[0][0]
    alignment = align(write(tmp_path / "one", filled(ranks_of())), write(tmp_path / "two", ranks))
    assert (WEIGHT, Role.REDUCED_GRAD) not in pairs_of(alignment)
    assert list(alignment.unruled.values()) == ["not every rank that holds a part of it recorded it"]
    assert any(note.startswith("1 records incomparable: not every rank") for note in alignment.notes)
    assert not alignment.unmatched


@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_that_differ_are_named(tp, tmp_path):
    ranks = filled(ranks_of(tp, dp=2))
    broken = ranks[-1]
    del broken.steps[0][-1], broken.payloads[0][-1]
    broken.add(NORM, REDUCED, tensor(NORM, REDUCED) * np.float32(1.5))
    healthy = write(tmp_path / "one", filled(ranks_of()))
    diagnosis = compare_runs(healthy, write(tmp_path / "two", ranks), replay=False)
    (finding,) = [f for f in diagnosis.findings if f.id == "parallel.replicas_differ"]
    assert (finding.where.fqn, finding.where.role) == (NORM, Role.REDUCED_GRAD)
    others = ", ".join(map(str, range(2 * tp - 1)))
    assert f"ranks {others} and ranks {2 * tp - 1} hold different bits" in finding.evidence


def test_a_gradient_before_its_reduction(tmp_path):
    """Nothing is compared of another split of the batch, nor of a sum of which bits alone are known."""
    kind = (Phase.WGRAD, Role.WGRAD)
    alone = [r.add(WEIGHT, kind).add(NORM, kind) for r in ranks_of()]
    one = write(tmp_path / "one", alone)
    wide = write(tmp_path / "two", [r.add(WEIGHT, kind).add(NORM, kind) for r in ranks_of(dp=2)])
    found = align(one, wide)
    assert not found.pairs
    assert set(found.unruled.values()) == {"the batch is split otherwise over the data-parallel ranks"}
    partial = Placement(shape=(5,), partial="the tensor-parallel group")
    ranks = [r.add(WEIGHT, kind) for r in ranks_of(tp=2, **{NORM: partial})]
    for rank in ranks:
        rank.add(NORM, kind, keep=False, sketched=False)
    found = align(one, write(tmp_path / "three", ranks))
    assert [p.key.fqn for p in found.pairs] == [WEIGHT]
    (reason,) = found.unruled.values()
    assert reason.startswith("a sum over the tensor-parallel group: fingerprints do not add up")


@pytest.mark.parametrize("kept", ["elements", "sketch"])
def test_terms_of_a_sum_are_added(kept, tmp_path):
    """From what the ranks keep: elements in float64, or sketches, which are linear."""
    kind = (Phase.WGRAD, Role.WGRAD)
    first, second = tensor(NORM, kind, seed=1), tensor(NORM, kind, seed=2)
    one = write(tmp_path / "one", [r.add(NORM, kind, first + second) for r in ranks_of()])
    partial = Placement(shape=(5,), partial="the tensor-parallel group")
    for name, term in (("right", second), ("wrong", second * np.float32(1.01)), ("lacking", None)):
        ranks = ranks_of(tp=2, **{NORM: partial})
        for rank, value in zip(ranks, (first, term), strict=True):
            if value is not None:
                rank.add(NORM, kind, value, keep=kept == "elements")
        found = align(one, write(tmp_path / name, ranks))
        if term is None:
            assert set(found.unruled.values()) == {"not every rank that holds a part of it recorded it"}
            continue
        (pair,) = found.pairs
        assert not pair.candidate.digest.exact
        diagnosis = compare_runs(one, load_run(tmp_path / name), policy="cross_layout", replay=False)
        (judged,) = [c for c in diagnosis.comparisons if c.key.phase is Phase.WGRAD]
        allowed = {"right": (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE), "wrong": (Verdict.DIVERGED,)}
        assert judged.verdict in allowed[name], judged
        measured = judged.metrics.get("rel_frobenius" if kept == "elements" else "sketch_high")
        assert judged.metrics["bitwise"] or (measured < 1e-6) == (name == "right")


def test_sketches_of_terms_of_which_one_overflowed_are_not_added(tmp_path):
    """The other term of that element would be left in the sum, and be a divergence of healthy fp16 runs."""
    kind = (Phase.WGRAD, Role.WGRAD)
    terms = [tensor(NORM, kind, seed=seed) for seed in (1, 2)]
    terms[0][0] = np.inf
    one = write(tmp_path / "one", [r.add(NORM, kind, sum(terms), keep=False) for r in ranks_of()])
    ranks = ranks_of(tp=2, **{NORM: Placement(shape=(5,), partial=TENSOR_GROUP)})
    for rank, term in zip(ranks, terms, strict=True):
        rank.add(NORM, kind, term, keep=False)
    found = align(one, write(tmp_path / "two", ranks))
    assert not found.pairs
    assert set(found.unruled.values()) == {
        f"a sum over {TENSOR_GROUP}: sketches leave out what is not finite (capture.level=tensor)"
    }


def compared_reduction(directory, terms, factor=1.0, *, keep=False):
    """Compare a gradient that is a sum over two tensor-parallel ranks, times a factor, with that of one."""
    kind = (Phase.ACCUMULATE, Role.MAIN_GRAD)
    (alone,) = ranks_of()
    alone.add(NORM, kind, sum(terms), keep=keep).add(NORM, REDUCED, sum(terms), keep=keep)
    one = write(directory / "one", [alone])
    ranks = ranks_of(tp=2, **{NORM: Placement(shape=(5,), partial=TENSOR_GROUP)})
    for rank, term in zip(ranks, terms, strict=True):
        rank.add(NORM, kind, term, keep=keep)
        rank.add(NORM, REDUCED, sum(terms) * np.float32(factor), keep=keep)
    diagnosis = compare_runs(one.path, write(directory / "two", ranks).path, replay=False)
    (judged,) = [c for c in diagnosis.comparisons if c.key.phase is Phase.REDUCE]
    return judged


@pytest.mark.parametrize("kept", ["elements", "sketch"])
@pytest.mark.parametrize("factor", [1.0, 1.0003])
def test_the_factor_of_a_reduction_over_terms_is_known(kept, factor, tmp_path):
    """A norm under sequence parallelism: its terms have no norm in common, their sketches add up."""
    terms = [tensor(NORM, REDUCED, seed=seed) for seed in (1, 2)]
    judged = compared_reduction(tmp_path, terms, factor, keep=kept == "elements")
    assert judged.metrics["bitwise"] or judged.metrics["gain_change"] == pytest.approx(factor - 1, rel=1e-3)
    assert (judged.verdict is Verdict.DIVERGED) == (factor != 1)


def test_a_sketch_tells_no_factor_where_something_overflowed(tmp_path):
    """It has the other rank's term of that element, and not the sum."""
    terms = [tensor(NORM, REDUCED, seed=seed) for seed in (1, 2)]
    terms[0][0] = np.inf
    judged = compared_reduction(tmp_path, terms, 1 + 2.0**-22)
    assert "gain_change" not in judged.metrics
    assert judged.verdict is Verdict.WITHIN_TOLERANCE


def test_equal_data_parallel_sizes_are_compared_lane_by_lane(tmp_path):
    kind = (Phase.WGRAD, Role.WGRAD)
    one, two = ranks_of(dp=2), ranks_of(tp=2, dp=2)
    for rank in (*one, *two):
        rank.add(WEIGHT, kind, tensor(WEIGHT, kind, seed=rank.coordinates.dp_rank))
    alignment = align(write(tmp_path / "one", one), write(tmp_path / "two", two))
    assert [p.rank for p in alignment.pairs] == [0, 1]
    assert all(p.baseline.digest.fingerprint == p.candidate.digest.fingerprint for p in alignment.pairs)
    assert [p.held_by[Side.CANDIDATE] for p in alignment.pairs] == [(0, 1), (2, 3)]


def test_copies_on_another_stage_are_the_same_parameter(tmp_path):
    copy = Placement(shape=SHAPE, partial="stages", copy_of=WEIGHT)
    stages = [
        Rank(RankCoordinates(rank=n, world_size=2, pp_rank=n, pp_size=2), {name: placement})
        for n, (name, placement) in enumerate(
            [(WEIGHT, Placement(shape=SHAPE, partial="stages")), (HEAD, copy)]
        )
    ]
    stages[0].add(WEIGHT, REDUCED)
    stages[1].add(HEAD, REDUCED, tensor(WEIGHT, REDUCED))
    alone = [Rank(RankCoordinates(), {WEIGHT: Placement(shape=SHAPE)}).add(WEIGHT, REDUCED)]
    alignment = align(write(tmp_path / "one", alone), write(tmp_path / "two", stages))
    (pair,) = alignment.pairs
    assert pair.baseline.digest.fingerprint == pair.candidate.digest.fingerprint
    assert pair.held_by[Side.CANDIDATE] == (0, 1)
    assert (alignment.replicas, alignment.unmatched) == ((), ())


def test_what_cannot_be_placed_is_left_out_on_both_sides(tmp_path):
    ranks = ranks_of(tp=2)
    for rank in ranks:
        rank.add(WEIGHT, REDUCED).add(NORM, REDUCED)
        rank.placements[WEIGHT] = None
    alone = [r.add(WEIGHT, REDUCED).add(NORM, REDUCED) for r in ranks_of()]
    alignment = align(write(tmp_path / "one", alone), write(tmp_path / "two", ranks))
    assert [p.key.fqn for p in alignment.pairs] == [NORM]
    assert alignment.unruled == {next(iter(alignment.unruled)): f"no layout rule for {WEIGHT}"}


def test_shards_that_number_their_own_elements_are_not_added_up(tmp_path):
    """As in runs of schema 2."""
    ranks = [r.add(WEIGHT, REDUCED, placed=False) for r in ranks_of(tp=2)]
    alone = [r.add(WEIGHT, REDUCED) for r in ranks_of()]
    alignment = align(write(tmp_path / "one", alone), write(tmp_path / "two", ranks))
    assert not alignment.pairs
    assert set(alignment.unruled.values()) == {"its elements are not numbered as the parameter's are"}


def test_the_two_ways_of_numbering_are_never_compared(tmp_path):
    """Runs of one layout, one of them of schema 2: equal shards would seem to differ."""
    one = write(tmp_path / "one", [r.add(WEIGHT, REDUCED) for r in ranks_of(tp=2)])
    two = write(tmp_path / "two", [r.add(WEIGHT, REDUCED, placed=False) for r in ranks_of(tp=2)])
    diagnosis = compare_runs(one, two, replay=False)
    found = [c for c in diagnosis.comparisons if c.key.fqn == WEIGHT]
    assert {c.verdict for c in found} == {Verdict.INCOMPARABLE}
    assert all("number the elements of a shard differently" in c.reason for c in found)


def initial_state(run):
    states = RecordedStates(run)
    return states.before(states.first)


def test_a_start_is_put_together_from_shards(tmp_path):
    start = initial_state(write(tmp_path / "run", filled(ranks_of(tp=2, stride=2))))
    found = start.parameter(WEIGHT, shape=SHAPE, dtype="float32")
    assert np.array_equal(found.bits.view(np.float32), tensor(WEIGHT, PARAM))


def test_a_start_says_what_it_lacks(tmp_path):
    thin = ranks_of(tp=2)
    for rank in thin:
        rank.add(WEIGHT, PARAM, keep=rank.coordinates.tp_rank == 0)
    start = initial_state(write(tmp_path / "run", thin))
    with pytest.raises(
        ConfigError, match=r"did not keep the elements of mlp.linear_fc1\.weight.*level: tensor"
    ):
        start.parameter(WEIGHT, shape=SHAPE, dtype="float32")
    with pytest.raises(ConfigError, match=r"did not record norm\.weight"):
        start.parameter(NORM, shape=(5,), dtype="float32")
    with pytest.raises(IncomparableError, match=r"found float32\[8, 3\], expected float32\[16, 3\]"):
        start.parameter(WEIGHT, shape=(16, 3), dtype="float32")
    half = [r.add(WEIGHT, PARAM) for r in ranks_of(tp=2)][:1]
    start = initial_state(write(tmp_path / "half", half))
    with pytest.raises(ConfigError, match=r"has mlp.linear_fc1\.weight in parts: not every rank"):
        start.parameter(WEIGHT, shape=SHAPE, dtype="float32")


def test_one_shard_keeps_todays_values(tmp_path):
    run = write(tmp_path / "run", filled(ranks_of()))
    merged = canonical(run, Side.BASELINE, lanes=Lanes.BATCHES).run.ranks[0]
    own = {r.key: r for r in run.ranks[0].records}
    assert {r.key: r.digest for r in merged.records} == {key: r.digest for key, r in own.items()}
    assert all(r.part is None for r in own.values())
