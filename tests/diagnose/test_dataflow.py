"""The table of rules itself, and corners of the graph that fake runs do not reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_precision.certify.naming import IDS as CERTIFY
from mindspeed_precision.ckpt.examine import CKPT
from mindspeed_precision.diagnose.dataflow import RULES, rule_for
from mindspeed_precision.diagnose.divergence import find_origins
from mindspeed_precision.diagnose.graph import Graph, make_node
from mindspeed_precision.diagnose.rules import finding_ids
from mindspeed_precision.evaluation.comparing import FINDINGS as EVALUATION
from mindspeed_precision.preflight import PREFLIGHT
from mindspeed_precision.records import (
    Comparison,
    Digest,
    Pair,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
    Verdict,
)
from mindspeed_precision.verify.invariants import INVARIANTS
from mindspeed_precision.verify.pair import PAIR

ROOT = Path(__file__).resolve().parents[2]


def documented_ids() -> set[str]:
    lines = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8").splitlines()
    return {line.split("`")[1] for line in lines if line.startswith("| `")}


def test_every_finding_is_documented_and_every_documented_one_exists():
    checks = INVARIANTS.ids() | PREFLIGHT.ids() | PAIR.ids() | CKPT.ids()
    assert documented_ids() == finding_ids() | checks | set(CERTIFY) | set(EVALUATION)


def test_rules_only_look_at_what_came_before():
    order = list(Phase)
    for rule in RULES:
        for source in (*rule.always, *(s for tier in rule.tiers for s in tier)):
            same_step = source.when.value not in ("state", "stream", "previous")
            assert not same_step or order.index(source.phase) <= order.index(rule.phase), rule


@pytest.mark.parametrize(
    ("phase", "role", "slot"),
    [
        (Phase.FPROP, Role.OUTPUT, "0"),
        (Phase.ACCUMULATE, Role.MAIN_GRAD, "after"),
        (Phase.OPTIMIZER, Role.PARAM, ""),
    ],
)
def test_what_training_computes_has_a_rule(phase, role, slot):
    assert rule_for(
        RecordKey(step=0, microbatch=0, phase=phase, fqn="m", role=role, slot=slot), is_parameter=True
    )


def node(seq, phase, role, fqn, *, rank=0, bits=None, where=None, microbatch=0, step=0, slot="", shape=(2,)):
    """Return a node that diverges, unless its bits are equal."""
    one, two = bits or (seq * 2 + 1, seq * 2 + 2)
    key = RecordKey(step=step, microbatch=microbatch, phase=phase, fqn=fqn, role=role, slot=slot)
    records = [
        TensorRecord(
            seq=seq,
            key=key,
            shape=shape,
            dtype="float32",
            layout=None,
            digest=Digest(fingerprint=b, unordered=b),
        )
        for b in (one, two)
    ]
    pair = Pair(rank=rank, baseline=records[0], candidate=records[1])
    verdict = Verdict.IDENTICAL if one == two else Verdict.DIVERGED
    comparison = Comparison(pair=pair, verdict=verdict, metrics={"bitwise": one == two})
    return make_node(comparison, where or RankCoordinates(rank=rank))


def origins(nodes, coordinates, parameters=None):
    graph = Graph(nodes, coordinates, {n: frozenset([n]) for n in parameters or ()})
    return [(o.key.fqn, o.key.role.value, o.ranks) for o in find_origins(graph)]


def test_pipeline_stage_receives_the_divergence_of_the_stage_before():
    stages = {rank: RankCoordinates(rank=rank, world_size=2, pp_rank=rank, pp_size=2) for rank in (0, 1)}
    nodes = [
        node(5, Phase.FPROP, Role.OUTPUT, "decoder.layers.0", bits=(7, 8), where=stages[0]),
        node(1, Phase.FPROP, Role.INPUT, "decoder.layers.1", rank=1, bits=(7, 8), where=stages[1]),
        node(2, Phase.DGRAD, Role.GRAD_INPUT, "decoder.layers.1", rank=1, bits=(9, 10), where=stages[1]),
        node(6, Phase.DGRAD, Role.GRAD_OUTPUT, "decoder.layers.0", bits=(9, 10), where=stages[0]),
    ]
    assert origins(nodes, stages) == [("decoder.layers.0", "output", (0,))]


def test_second_chunk_of_a_stage_receives_what_a_later_stage_sent():
    # virtual pipeline: layer 2 is on stage 0 again, after layer 1 on stage 1
    stages = {rank: RankCoordinates(rank=rank, world_size=2, pp_rank=rank, pp_size=2) for rank in (0, 1)}
    nodes = [
        node(5, Phase.FPROP, Role.OUTPUT, "decoder.layers.1", rank=1, bits=(7, 8), where=stages[1]),
        node(9, Phase.FPROP, Role.INPUT, "decoder.layers.2", bits=(7, 8), where=stages[0]),
    ]
    assert origins(nodes, stages) == [("decoder.layers.1", "output", (1,))]


def test_tensor_parallel_peer_explains_an_output_but_not_its_own_twin():
    peers = {rank: RankCoordinates(rank=rank, world_size=2, tp_rank=rank, tp_size=2) for rank in (0, 1)}
    spread = [
        node(0, Phase.FPROP, Role.INPUT, "fc2", where=peers[0]),
        node(1, Phase.FPROP, Role.OUTPUT, "fc2", where=peers[0]),
        node(1, Phase.FPROP, Role.OUTPUT, "fc2", rank=1, where=peers[1]),
    ]
    assert origins(spread, peers) == [("fc2", "input", (0,))]
    twins = [node(1, Phase.FPROP, Role.OUTPUT, "fc2", rank=r, where=peers[r]) for r in (0, 1)]
    assert origins(twins, peers) == [("fc2", "output", (0, 1))]


def test_a_partial_sum_that_has_the_bits_of_its_total_makes_no_circle():
    # vocabulary-parallel loss: rank 1 contributes zeros, so what rank 0 gives is what both get back
    ranks = {rank: RankCoordinates(rank=rank, world_size=2, tp_rank=rank, tp_size=2) for rank in (0, 1)}
    got = [
        node(
            13 - 4 * rank,
            Phase.FPROP,
            Role.OUTPUT,
            "",
            slot="all_reduce",
            rank=rank,
            bits=(7, 8),
            where=ranks[rank],
        )
        for rank in (0, 1)
    ]
    nodes = [
        node(11, Phase.FPROP, Role.OUTPUT, "output_layer", bits=(3, 4), where=ranks[0]),
        node(12, Phase.FPROP, Role.INPUT, "", slot="all_reduce", bits=(7, 8), where=ranks[0]),
        *got,
    ]
    assert origins(nodes, ranks) == [("output_layer", "output", (0,))]


def test_data_parallel_replicas_are_independent_before_the_reduction():
    replicas = {rank: RankCoordinates(rank=rank, world_size=2, dp_rank=rank, dp_size=2) for rank in (0, 1)}
    nodes = [
        node(0, Phase.FPROP, Role.INPUT, "fc2", where=replicas[0]),
        node(1, Phase.FPROP, Role.OUTPUT, "fc2", rank=1, where=replicas[1]),
    ]
    assert len(origins(nodes, replicas)) == 2


def test_tied_output_layer_explains_the_gradient_of_the_embedding():
    alone = {0: RankCoordinates()}
    gemm = node(3, Phase.WGRAD, Role.WGRAD, "output_layer", shape=(8, 4))
    shared = node(4, Phase.WGRAD, Role.WGRAD, "embedding.weight", shape=(8, 4))
    assert origins([gemm, shared], alone, ["embedding.weight"]) == [("output_layer", "wgrad", (0,))]
    other = node(4, Phase.WGRAD, Role.WGRAD, "norm.weight", shape=(4,))
    assert len(origins([gemm, other], alone, ["norm.weight"])) == 2


def test_recomputed_forward_does_not_start_anything():
    alone = {0: RankCoordinates()}
    first = node(0, Phase.FPROP, Role.OUTPUT, "decoder.layers.0", bits=(3, 4))
    again = node(9, Phase.FPROP, Role.INPUT, "decoder.layers.1", bits=(3, 4))
    assert origins([first, again], alone) == [("decoder.layers.0", "output", (0,))]


def test_bias_that_is_added_outside_its_module_explains_what_follows():
    alone = {0: RankCoordinates()}
    bias = "decoder.layers.0.self_attention.linear_proj.bias"
    moved = node(50, Phase.OPTIMIZER, Role.PARAM, bias, microbatch=-1)
    after = node(9, Phase.FPROP, Role.INPUT, "decoder.layers.0.pre_mlp_layernorm", step=1, slot="0")
    assert origins([moved, after], alone, [bias]) == [(bias, "param", (0,))]
    elsewhere = node(9, Phase.FPROP, Role.INPUT, "decoder.layers.1.pre_mlp_layernorm", step=1, slot="0")
    assert len(origins([moved, elsewhere], alone, [bias])) == 2


def test_factor_of_a_group_is_no_second_origin_beside_its_product():
    alone = {0: RankCoordinates()}
    kind = (Phase.OPTIMIZER, Role.HYPERPARAMETER, "w")
    factor = node(1, *kind, slot="wd_mult", microbatch=-1)
    product = node(2, *kind, slot="weight_decay", microbatch=-1)
    graph = Graph([factor, product], alone, {"w": frozenset(["w"])})
    assert [origin.key.slot for origin in find_origins(graph)] == ["weight_decay"]
    graph = Graph([factor], alone, {"w": frozenset(["w"])})
    assert [origin.key.slot for origin in find_origins(graph)] == ["wd_mult"]


def test_an_origin_speaks_of_its_first_rank():
    replicas = {rank: RankCoordinates(rank=rank, world_size=2, dp_rank=rank, dp_size=2) for rank in (0, 1)}
    nodes = [node(3 - r, Phase.WGRAD, Role.WGRAD, "fc2", rank=r, where=replicas[r]) for r in (0, 1)]
    (origin,) = find_origins(Graph(nodes, replicas, {}))
    assert origin.ranks == (0, 1)
    assert origin.comparison.pair.rank == 0


def test_ranges_of_one_reduced_gradient_are_one_origin():
    replicas = {rank: RankCoordinates(rank=rank, world_size=2, dp_rank=rank, dp_size=2) for rank in (0, 1)}
    nodes = [
        node(1, Phase.REDUCE, Role.REDUCED_GRAD, "w", rank=r, microbatch=-1, slot=slot, where=replicas[r])
        for r, slot in enumerate(("0:3", "3:8"))
    ]
    (origin,) = find_origins(Graph(nodes, replicas, {"w": frozenset("w")}))
    assert (origin.ranks, origin.key.slot) == ((0, 1), "0:3")
    apart = node(1, Phase.REDUCE, Role.REDUCED_GRAD, "v", microbatch=-1, slot="0:3", where=replicas[0])
    assert len(find_origins(Graph([*nodes, apart], replicas, {n: frozenset(n) for n in "wv"}))) == 2


@pytest.mark.parametrize("late", [True, False])
def test_a_range_that_is_gathered_later_is_what_every_replica_computes_with(late):
    replicas = {rank: RankCoordinates(rank=rank, world_size=2, dp_rank=rank, dp_size=2) for rank in (0, 1)}
    updated = node(1, Phase.OPTIMIZER, Role.PARAM, "m.weight", microbatch=-1, where=replicas[0])
    given = node(2, Phase.FPROP, Role.OUTPUT, "m", rank=1, step=1, where=replicas[1])
    names = {"m.weight": frozenset(["m.weight"])}
    found = find_origins(Graph([updated, given], replicas, names, gathers_late=late))
    assert len(found) == (1 if late else 2)


def test_circle_of_explanations_still_has_an_origin():
    # two stages whose tensors have each other's bits: only unknown dataflow can look like this
    stages = {rank: RankCoordinates(rank=rank, world_size=2, pp_rank=rank, pp_size=2) for rank in (0, 1)}
    nodes = [
        node(1, Phase.FPROP, Role.INPUT, "a", bits=(5, 6), where=stages[0]),
        node(2, Phase.FPROP, Role.OUTPUT, "a", bits=(7, 8), where=stages[0]),
        node(1, Phase.FPROP, Role.INPUT, "b", rank=1, bits=(7, 8), where=stages[1]),
        node(2, Phase.FPROP, Role.OUTPUT, "b", rank=1, bits=(5, 6), where=stages[1]),
    ]
    assert origins(nodes, stages) == [("a", "input", (0,))]
