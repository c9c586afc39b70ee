"""A token that rounding sends to another expert is no fault; a row as wrong as that, or a choice, is one."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    INIT_STEP,
    NO_MICROBATCH,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
    Verdict,
)
from mindspeed_precision.report.console import render

TOKENS, HIDDEN, EXPERTS = 64, 16, 4
TIED = 5
"""The token of which two experts have as good as equal scores."""

ROUTER, EXPERT_LAYER, LAYER = "decoder.layers.0.mlp.router", "decoder.layers.0.mlp", "decoder.layers.0"
NEXT = "decoder.layers.1.input_layernorm"


def model():
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(EXPERTS, HIDDEN))
    experts = rng.normal(size=(EXPERTS, HIDDEN, HIDDEN)) / 4
    tokens = rng.normal(size=(TOKENS, HIDDEN))
    order = np.argsort(tokens[TIED] @ weight.T)
    apart = (
        weight[order[1]] - weight[order[2]]
    )  # the second choice, and the expert that is left out by a hair
    tokens[TIED] -= apart * (tokens[TIED] @ apart) / (apart @ apart)
    return weight.astype(np.float32), experts, tokens.astype(np.float32), np.float32(1e-6) * apart


def forward(*, candidate, choose=None, wrong_row=None, scale=1.0, k=2, dropped=None, shift=0):
    """Return what a run records: the candidate's tokens are rounded otherwise, and one is turned thereby.

    ``choose``: a token that is sent to the wrong expert. ``wrong_row``: one that the layer treats so.
    ``scale``: of what the router receives, a fault before it. ``k``: experts of a token. ``dropped``: a token
    that no expert gets. ``shift``: of all choices, to other experts.
    """
    weight, experts, tokens, turn = model()
    if candidate:
        tokens = tokens * (1 + np.random.default_rng(9).choice([-1e-7, 0, 1e-7], tokens.shape))
    tokens = tokens.copy()
    tokens[TIED] += turn if candidate else -turn
    tokens = (tokens * scale).astype(np.float32)
    scores = tokens @ weight.T
    chosen = np.argsort(scores, axis=1)[:, -k:]
    if choose is not None:
        chosen[choose, 0] = np.argsort(scores[choose])[0]
    routes = np.zeros((TOKENS, EXPERTS), bool)
    np.put_along_axis(routes, chosen, True, axis=1)
    if dropped is not None:
        routes[dropped] = False
    routes = np.roll(routes, shift, axis=1)
    used = routes.copy()
    if wrong_row is not None:
        used[wrong_row] = np.roll(used[wrong_row], 1)
    probabilities = np.where(routes, np.exp(scores), 0)
    probabilities = probabilities / np.maximum(probabilities.sum(axis=1, keepdims=True), 1e-30)
    mixed = np.einsum("te,ehk,th->tk", used / 2, experts, tokens)
    after = tokens + mixed
    shape = (TOKENS // 2, 2, HIDDEN)
    return [
        (ROUTER, Role.INPUT, "0", tokens.reshape(shape)),
        (ROUTER, Role.OUTPUT, "0", probabilities),
        (ROUTER, Role.OUTPUT, "1", routes),
        (EXPERT_LAYER, Role.OUTPUT, "0", mixed.reshape(shape)),
        (LAYER, Role.OUTPUT, "0", after.reshape(shape)),
        (NEXT, Role.OUTPUT, "0", (after / after.std(axis=1, keepdims=True)).reshape(shape)),
    ]


def write(path, *, keep=True, transformer=None, **changes):
    create_run(path, {"config": {"transformer_config": transformer or {}}})
    writer = RankWriter(path, coordinates=RankCoordinates())
    names = {f"{ROUTER}.weight": (EXPERTS, HIDDEN), f"{NEXT}.weight": (HIDDEN,)}
    writer.declare_parameters(
        [ParameterDeclaration(fqn=n, shape=s, dtype="float32", trainable=True) for n, s in names.items()]
    )
    weight = RecordKey(
        step=INIT_STEP, microbatch=NO_MICROBATCH, phase=Phase.INIT, fqn=f"{ROUTER}.weight", role=Role.PARAM
    )
    of_step = [
        (RecordKey(step=0, microbatch=0, phase=Phase.FPROP, fqn=fqn, role=role, slot=slot), values)
        for fqn, role, slot, values in forward(**changes)
    ]
    first = 0
    for step, found in ((INIT_STEP, [(weight, model()[0])]), (0, of_step)):
        records, kept = [], {}
        for key, values in found:
            numbers = np.ascontiguousarray(values if values.dtype == bool else values.astype(np.float32))
            host = HostTensor(bits=numbers.view(f"u{numbers.itemsize}"), dtype=str(numbers.dtype))
            record = TensorRecord(
                seq=first + len(records),
                key=key,
                shape=numbers.shape,
                dtype=host.dtype,
                layout=None,
                digest=digest_host(host, statistics=True),
            )
            records.append(record)
            if keep:
                kept[record.seq] = host
        first += len(records)
        writer.write_step(step, records, kept, microbatches=1)
    writer.close(complete=True)
    return load_run(path)


@pytest.fixture
def compared(tmp_path):
    """Return a function: what is wrong with the candidate in, the diagnosis out."""

    def run(keep=True, transformer=None, **fault):
        common = {"keep": keep, "transformer": transformer}
        one = write(tmp_path / "one", candidate=False, **common)
        two = write(tmp_path / "two", candidate=True, **common, **fault)
        return compare_runs(one, two, policy="cross_layout", replay=False)

    return run


def place(diagnosis):
    key = diagnosis.first_divergence.key
    return key.fqn, key.role, key.slot


def test_a_route_that_rounding_turns_is_no_finding(compared):
    diagnosis = compared()
    maps = [c for c in diagnosis.comparisons if (c.key.fqn, c.key.slot) == (ROUTER, "1")]
    assert [c.metrics["rerouted"] for c in maps] == [1]
    assert diagnosis.status is not Verdict.DIVERGED, render(diagnosis)
    assert not [f for f in diagnosis.findings if "value" in f.id]
    (note,) = [note for note in diagnosis.notes if "another route by rounding" in note]
    assert note.startswith("1 token took another route")


def test_a_row_as_wrong_as_that_is_found_beside_it(compared):
    """One other token of the layer of experts, whose route did not turn."""
    diagnosis = compared(wrong_row=40)
    assert place(diagnosis) == (EXPERT_LAYER, Role.OUTPUT, "0")


def test_a_choice_against_the_scores_is_found(compared):
    diagnosis = compared(choose=40)
    assert place(diagnosis)[:2] == (ROUTER, Role.OUTPUT)
    (judged,) = [c for c in diagnosis.comparisons if (c.key.fqn, c.key.slot) == (ROUTER, "1")]
    assert judged.verdict is Verdict.DIVERGED
    assert judged.reason.startswith("in the candidate token 40 goes to expert")


OF_MEGATRON = [{}, {"moe_router_num_groups": 2}, {"moe_router_enable_expert_bias": True}]


@pytest.mark.parametrize("transformer", OF_MEGATRON)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"k": 1}, "is given to 1 expert, in the baseline to 2 experts"),
        ({"k": 3}, "is given to 3 experts, in the baseline to 2 experts"),
        ({"dropped": 40}, "token 40 is given to 0 experts, in the baseline to 2 experts"),
    ],
)
def test_another_number_of_experts_is_no_rounding(fault, said, transformer, compared):
    diagnosis = compared(transformer=transformer, **fault)
    assert place(diagnosis)[:2] == (ROUTER, Role.OUTPUT)
    (judged,) = [c for c in diagnosis.comparisons if (c.key.fqn, c.key.slot) == (ROUTER, "1")]
    assert judged.verdict is Verdict.DIVERGED
    assert said in judged.reason


@pytest.mark.parametrize("transformer", OF_MEGATRON[1:])
def test_tokens_that_all_go_elsewhere_are_excused_by_nothing(transformer, compared):
    """Also where the choice cannot be computed anew."""
    diagnosis = compared(transformer=transformer, shift=1)
    (judged,) = [c for c in diagnosis.comparisons if (c.key.fqn, c.key.slot) == (ROUTER, "1")]
    assert (judged.verdict, diagnosis.status) == (Verdict.DIVERGED, Verdict.DIVERGED)
    assert "of 64 tokens take another route" in judged.reason
    after = [c for c in diagnosis.comparisons if c.key.fqn in (EXPERT_LAYER, LAYER, NEXT)]
    assert {c.verdict for c in after} == {Verdict.DIVERGED}


def test_routes_that_a_fault_before_the_router_turned_excuse_nothing(compared):
    diagnosis = compared(scale=1.05)
    assert place(diagnosis) == (ROUTER, Role.INPUT, "0")
    after = [c for c in diagnosis.comparisons if c.key.fqn in (LAYER, NEXT)]
    assert {c.verdict for c in after} == {Verdict.DIVERGED}


@pytest.mark.parametrize("more", [{"keep": False}, {"transformer": {"moe_router_num_groups": 2}}])
def test_a_choice_that_cannot_be_computed_is_named_and_not_judged(more, compared):
    diagnosis = compared(**more)
    (judged,) = [c for c in diagnosis.comparisons if (c.key.fqn, c.key.slot) == (ROUTER, "1")]
    assert (judged.verdict, judged.excused) == (Verdict.INCOMPARABLE, True)
    assert any("routes differ and are not judged" in note for note in diagnosis.notes)
    assert not [o for o in diagnosis.origins if o.key.fqn == ROUTER and o.key.slot == "1"]


def test_without_a_tolerance_another_route_is_another_result(tmp_path):
    one, two = (write(tmp_path / name, candidate=name == "two") for name in ("one", "two"))
    assert compare_runs(one, two, replay=False).status is Verdict.DIVERGED


def test_a_second_pass_keeps_what_judges_routes_that_nothing_was_kept_of(compared):
    """Also where the first divergence is elsewhere: a token that rounding turned may be behind it."""
    diagnosis = compared(keep=False, wrong_row=40)
    assert place(diagnosis)[0] != ROUTER
    rules = diagnosis.refinement.settings["capture"]["rules"]
    kept = {(rule["phase"], rule["fqn"], rule["role"]) for rule in rules if rule["level"] == "tensor"}
    assert kept >= {
        ("fprop", ROUTER, "*"),
        ("fprop", EXPERT_LAYER, "output"),
        ("fprop", LAYER, "output"),
        ("init", f"{ROUTER}.*", "param"),
    }
    (rule,) = [rule for rule in rules if rule["fqn"] == LAYER]
    assert (rule["steps"], rule["microbatches"]) == ("0", "0")
