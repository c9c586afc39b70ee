"""Other context- and expert-parallel sizes, in runs written by hand: what is the same sum in both runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from test_layout import REDUCED, WEIGHT, Rank, split, tensor, write

from mindspeed_precision.align import align
from mindspeed_precision.align.lanes import describe_layout
from mindspeed_precision.compare import load_policy
from mindspeed_precision.diagnose.coverage import gaps
from mindspeed_precision.diagnose.pipeline import gather_facts
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import NO_MICROBATCH, Phase, RankCoordinates, Role, Side, Verdict

WGRAD = (Phase.WGRAD, Role.WGRAD)
EXPERTS = tuple(f"mlp.experts.local_experts.{number}.linear_fc1.weight" for number in range(2))
CONTEXT = "not summed yet over the context-parallel group"
ELSEWHERE = "an expert's tokens come from other ranks"


def of_expert(number, kind):
    return tensor(WEIGHT, kind, seed=number + 1)


def reasons(alignment):
    return {(key.fqn, key.role): reason for key, reason in alignment.unruled.items()}


def pairs(alignment, kind):
    return {(p.rank, p.key.fqn): p for p in alignment.pairs if (p.key.phase, p.key.role) == kind}


def agree(pair):
    return pair.baseline.digest.fingerprint == pair.candidate.digest.fingerprint


def context_parallel(cp, tp=1):
    return [
        Rank(
            RankCoordinates(
                rank=c * tp + t, world_size=cp * tp, tp_rank=t, tp_size=tp, cp_rank=c, cp_size=cp
            ),
            {WEIGHT: split(t, tp)},
        ).add(WEIGHT, REDUCED).add(WEIGHT, WGRAD, tensor(WEIGHT, WGRAD, seed=c))
        for c in range(cp)
        for t in range(tp)
    ]  # fmt: skip


def test_context_parallel_ranks_hold_replicas_after_the_reduction_alone(tmp_path):
    one, two = (write(tmp_path / str(cp), context_parallel(cp)) for cp in (1, 2))
    assert describe_layout(two) == "TP1 PP1 DP1 CP2"
    for alignment, side in ((align(one, two), Side.CANDIDATE), (align(two, one), Side.BASELINE)):
        ((_, pair),) = pairs(alignment, REDUCED).items()
        assert agree(pair)
        assert pair.held_by[side] == (0, 1)
        assert not pairs(alignment, WGRAD)
        assert reasons(alignment) == {(WEIGHT, Role.WGRAD): CONTEXT}
        assert not alignment.unmatched


def test_equal_context_parallel_sizes_are_compared_lane_by_lane(tmp_path):
    one, two = (write(tmp_path / str(tp), context_parallel(2, tp)) for tp in (1, 2))
    alignment = align(one, two)
    found = pairs(alignment, WGRAD)
    assert {rank: pair.held_by[Side.CANDIDATE] for (rank, _), pair in found.items()} == {0: (0, 1), 1: (2, 3)}
    assert all(map(agree, found.values()))
    assert not alignment.unruled


def test_a_context_parallel_rank_whose_gradient_was_not_reduced_is_named(tmp_path):
    ranks = context_parallel(2)
    ranks[1].steps[0], ranks[1].payloads[0] = [], []
    ranks[1].add(WEIGHT, REDUCED, tensor(WEIGHT, REDUCED) * np.float32(2)).add(WEIGHT, WGRAD)
    one = write(tmp_path / "one", context_parallel(1))
    diagnosis = compare_runs(one, write(tmp_path / "two", ranks), replay=False)
    (finding,) = [f for f in diagnosis.findings if f.id == "parallel.replicas_differ"]
    assert finding.where.fqn == WEIGHT
    assert "ranks 0 and ranks 1 hold different bits" in finding.evidence


def mixture(directory, *, ep=1, etp=1, tp=1, dp=1, wrong=None, share=1.0, sequence_parallel=None):
    """Write a run with a dense weight and two experts, of whose dW each rank has a share.

    Experts are distributed over consecutive ranks, as Megatron does it: first over a tensor-parallel group.
    """
    ranks = []
    for number in range(tp * dp):
        where = RankCoordinates(
            rank=number,
            world_size=tp * dp,
            tp_rank=number % tp,
            tp_size=tp,
            dp_rank=number // tp,
            dp_size=dp,
            ep_rank=number // etp % ep,
            ep_size=ep,
        )
        own = [e for e in range(2) if e % ep == where.ep_rank]
        placements = {WEIGHT: split(where.tp_rank, tp), **{EXPERTS[e]: split(number % etp, etp) for e in own}}
        rank = Rank(where, placements).add(WEIGHT, REDUCED).add(WEIGHT, WGRAD)
        for e in own:
            value = of_expert(e, REDUCED) * np.float32(2 if wrong == number else 1)
            rank.add(EXPERTS[e], REDUCED, value)
            rank.add(EXPERTS[e], WGRAD, of_expert(e, WGRAD) * np.float32(share))
        ranks.append(rank)
    write(directory, ranks)
    manifest = json.loads((directory / "run.json").read_text())
    scattered = tp > 1 if sequence_parallel is None else sequence_parallel
    settings = {"num_moe_experts": 2, "expert_tensor_parallel_size": etp, "sequence_parallel": scattered}
    manifest["config"] = {"transformer_config": settings}
    (directory / "run.json").write_text(json.dumps(manifest))
    return load_run(directory)


def with_a_microbatch(run):
    return replace(
        run, ranks={number: replace(rank, microbatches={0: 1}) for number, rank in run.ranks.items()}
    )


@pytest.mark.parametrize(
    "layout",
    [{"ep": 2, "dp": 2}, {"ep": 2, "dp": 4}, {"ep": 2, "tp": 2, "etp": 2, "dp": 2}, {"ep": 2, "tp": 2}],
)
def test_experts_are_compared_wherever_they_live(layout, tmp_path):
    one, two = mixture(tmp_path / "one"), mixture(tmp_path / "two", **layout)
    alignment = align(one, two)
    found = {name: pair for (_, name), pair in pairs(alignment, REDUCED).items()}
    assert set(found) == {WEIGHT, *EXPERTS}
    assert all(map(agree, found.values()))
    ranks = range(layout.get("tp", 1) * layout.get("dp", 1))
    etp = layout.get("etp", 1)
    for number, name in enumerate(EXPERTS):
        held = found[name].held_by[Side.CANDIDATE]
        assert held == tuple(r for r in ranks if r // etp % 2 == number)
    assert not alignment.unmatched
    assert not alignment.replicas


def test_an_expert_of_another_rank_has_the_tokens_of_others_too(tmp_path):
    one, two = mixture(tmp_path / "one", dp=2), mixture(tmp_path / "two", dp=2, ep=2)
    alignment = align(one, two)
    assert set(pairs(alignment, WGRAD)) == {(0, WEIGHT), (1, WEIGHT)}
    assert reasons(alignment) == {(name, Role.WGRAD): ELSEWHERE for name in EXPERTS}
    policy = load_policy("exact")
    baseline, candidate = (with_a_microbatch(run) for run in (alignment.baseline, alignment.candidate))
    assert gaps(gather_facts(baseline, candidate, alignment, policy=policy)) == []
    last = candidate.ranks[1]
    lost = replace(last, records=tuple(r for r in last.records if r.key.fqn != EXPERTS[1]))
    lossy = replace(candidate, ranks={**candidate.ranks, 1: lost})
    assert [gap.fqn for gap in gaps(gather_facts(baseline, lossy, alignment, policy=policy))] == [EXPERTS[1]]


SPREAD = [
    ({"dp": 2, "share": 0.5}, {"dp": 2, "ep": 2}),
    ({"dp": 4, "share": 0.25}, {"dp": 4, "ep": 2, "share": 0.5}),
    ({"dp": 2, "share": 0.5}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
    ({}, {"tp": 2, "share": 0.5}),  # tokens are split, copies of the experts are not
]


def summed(alignment):
    found = [p for p in alignment.pairs if p.key.phase is Phase.WGRAD and p.key.fqn in EXPERTS]
    assert all(p.key.microbatch == NO_MICROBATCH for p in found)
    return [p.key.fqn for p in found]


@pytest.mark.parametrize("layouts", SPREAD)
def test_over_a_step_an_expert_has_the_same_tokens(layouts, tmp_path):
    """However they are spread: the shares of all ranks are the sum; one of them is wrong, and is found."""
    one, two = (with_a_microbatch(mixture(tmp_path / str(n), **how)) for n, how in enumerate(layouts))
    for pair in ((one, two), (two, one)):
        assert sorted(summed(align(*pair))) == sorted(EXPERTS)
        diagnosis = compare_runs(*pair, policy="cross_layout", replay=False)
        assert diagnosis.first_divergence is None
        judged = [c for c in diagnosis.comparisons if c.key.phase is Phase.WGRAD and c.key.fqn in EXPERTS]
        assert {c.verdict for c in judged} <= {Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE}
    share = layouts[1].get("share", 1.0) * 1.001
    wrong = with_a_microbatch(mixture(tmp_path / "wrong", **{**layouts[1], "share": share}))
    diagnosis = compare_runs(one, wrong, policy="cross_layout", replay=False)
    assert [(o.key.fqn, o.key.role, o.key.microbatch) for o in diagnosis.origins] == [
        (name, Role.WGRAD, NO_MICROBATCH) for name in EXPERTS
    ]
    assert diagnosis.origins[0].held_by == tuple(
        number for number, rank in two.ranks.items() if EXPERTS[0] in {p.fqn for p in rank.parameters}
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_over_a_step_that_lacks_a_rank_is_said_and_not_compared(rank, tmp_path):
    runs = [mixture(tmp_path / "one", dp=2, share=0.5), mixture(tmp_path / "two", dp=2, ep=2)]
    one, two = map(with_a_microbatch, runs)
    kept = [r for r in one.ranks[rank].records if (r.key.fqn, r.key.phase) != (EXPERTS[1], Phase.WGRAD)]
    ranks = {**one.ranks, rank: replace(one.ranks[rank], records=tuple(kept))}
    alignment = align(replace(one, ranks=ranks), two)
    assert summed(alignment) == [EXPERTS[0]]
    assert not alignment.unmatched
    told = {key.fqn: reason for key, reason in alignment.unruled.items() if key.microbatch == NO_MICROBATCH}
    assert told == {EXPERTS[1]: "not every rank and microbatch of a step recorded an expert's dW"}


def test_ranks_that_may_have_the_same_tokens_are_not_added_up(tmp_path):
    """Copies of an expert on tensor-parallel ranks that do not split the sequence."""
    one, two = mixture(tmp_path / "one"), mixture(tmp_path / "two", tp=2, sequence_parallel=False)
    assert summed(align(*map(with_a_microbatch, (one, two)))) == []


def test_steps_of_other_microbatches_are_not_the_same_sum(tmp_path):
    one, two = mixture(tmp_path / "one", dp=2, share=0.5), mixture(tmp_path / "two", dp=2, ep=2)
    ranks = {number: replace(rank, microbatches={0: 2}) for number, rank in two.ranks.items()}
    assert summed(align(with_a_microbatch(one), replace(two, ranks=ranks))) == []


def test_an_expert_within_the_tensor_parallel_group_has_the_tokens_of_its_lane(tmp_path):
    one, two = mixture(tmp_path / "one"), mixture(tmp_path / "two", tp=2, ep=2)
    assert describe_layout(two) == "TP2 PP1 DP1 EP2 ETP1, sequence parallel"
    alignment = align(one, two)
    assert set(pairs(alignment, WGRAD)) == {(0, name) for name in (WEIGHT, *EXPERTS)}
    assert not alignment.unruled


def test_modules_of_experts_that_are_split_otherwise_are_not_compared(tmp_path):
    """Equal tensor-parallel groups, that split each expert in one run and hold whole ones in the other."""
    module, output = "mlp.experts.local_experts.0", (Phase.FPROP, Role.OUTPUT)
    runs = [
        mixture(tmp_path / name, tp=2, **more) for name, more in (("one", {"etp": 2}), ("two", {"ep": 2}))
    ]
    for run in runs:
        for number, rank in run.ranks.items():
            first = next(r for r in rank.records if r.key.phase is Phase.WGRAD)
            keys = [replace(first.key, fqn=name, phase=output[0], role=output[1]) for name in (module, "mlp")]
            added = [replace(first, seq=100 + n, key=key, part=None) for n, key in enumerate(keys)]
            run.ranks[number] = replace(rank, records=(*rank.records, *added))
    alignment = align(*runs)
    assert {name for _, name in pairs(alignment, output)} == {"mlp"}
    assert reasons(alignment) == {(module, Role.OUTPUT): "no layout rule for modules of experts"}
    assert set(pairs(alignment, WGRAD)) == {(0, name) for name in (WEIGHT, *EXPERTS)}


def test_a_copy_of_an_expert_sees_a_part_of_the_tokens(tmp_path):
    """TP2 with whole experts and no expert parallelism: dW of a copy is a partial sum."""
    one, two = mixture(tmp_path / "one"), mixture(tmp_path / "two", tp=2)
    assert reasons(align(one, two)) == {(name, Role.WGRAD): ELSEWHERE for name in EXPERTS}


def test_a_dense_model_has_no_size_of_experts(tmp_path):
    """One of the runs does not say how it splits experts; there are none."""
    one = write(tmp_path / "one", [Rank(RankCoordinates(), {WEIGHT: split(0, 1)}).add(WEIGHT, WGRAD)])
    ranks = [
        Rank(RankCoordinates(rank=t, world_size=2, tp_rank=t, tp_size=2), {WEIGHT: split(t, 2)})
        for t in range(2)
    ]
    alignment = align(one, write(tmp_path / "two", [rank.add(WEIGHT, WGRAD) for rank in ranks]))
    assert [pair.key.fqn for pair in alignment.pairs] == [WEIGHT]


def test_replicas_of_an_expert_that_differ_are_named(tmp_path):
    one, two = mixture(tmp_path / "one"), mixture(tmp_path / "two", dp=4, ep=2, wrong=3)
    (found,) = align(one, two).replicas
    assert (found.key.fqn, found.ranks) == (EXPERTS[1], ((1,), (3,)))
