"""Random generators: equal where ranks must draw alike, different where they must not, and drawn from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from mindspeed_precision.dump.reported import reported_entries, reported_finding
from mindspeed_precision.records import Finding, Phase, RankCoordinates, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.places import Found, in_execution_order, seen_first, steps_text, tensor_group
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank, whole_run

ALIKE = ("data-parallel-rng", "cuda", "npu")
"""Generators from which a tensor-parallel group draws for tensors that all its ranks have whole."""

APART = ("model-parallel-rng",)
"""Generators from which a tensor-parallel group draws for what each rank has a part of."""

_EXPERTS = "expert-parallel-rng"


@invariant(
    "rng.differs_in_tensor_group",
    "rng.equal_in_tensor_group",
    holds="generators that are drawn from are equal over TP for whole tensors, and differ for split ones",
    unit="states",
    span=[whole_run((Phase.BATCH, Role.RNG))],
)
def tensor_group_states(facts: RunFacts) -> Answer:
    """Compare the states of generators that a step draws from, over each tensor-parallel group."""
    if max(rank.coordinates.tp_size for rank in facts.ranks.values()) == 1:
        return Answer(exercised=0, applies=False)
    states = states_of(facts)
    used = _used(states)
    alike = list(_groups(facts, states, used, ALIKE, tensor_group))
    apart = list(_groups(facts, states, used, APART, tensor_group))
    apart += list(_groups(facts, states, used, (_EXPERTS,), _expert_group))
    findings = []
    wrong = [members for members in alike if len({record.digest.fingerprint for _, record in members}) > 1]
    if wrong:
        findings.append(_finding(facts, "rng.differs_in_tensor_group", wrong, _DIFFERS, _DIFFERS_REMEDY))
    same = [
        members
        for members in apart
        if len({record.digest.fingerprint for _, record in members}) < len(members)
    ]
    if same:
        findings.append(_finding(facts, "rng.equal_in_tensor_group", same, _EQUAL, _EQUAL_REMEDY))
    looked = len(alike) + len(apart)
    skipped = (
        ""
        if looked
        else "no step draws from a generator of Megatron's, or fewer than two steps were recorded"
    )
    return Answer(exercised=looked, findings=tuple(findings), failed=len(wrong) + len(same), skipped=skipped)


_DIFFERS = "ranks of a tensor-parallel group draw different numbers for tensors that all of them have whole"
_DIFFERS_REMEDY = (
    "seed the default generator alike over the tensor-parallel group (model_parallel_cuda_manual_seed), and "
    "fork the tracker around what only some ranks draw"
)
_EQUAL = "ranks draw the same numbers for their different parts of a tensor"
_EQUAL_REMEDY = (
    "seed the tracker with the rank (model_parallel_cuda_manual_seed), and load each rank's own state from a "
    "checkpoint"
)

_States = Mapping[tuple[int, str], list[TensorRecord]]
"""By rank and generator, the states at the start of steps, in order."""


def states_of(facts: RunFacts) -> _States:
    """Return the states of generators at the start of the steps, by rank and generator."""
    found: dict[tuple[int, str], list[TensorRecord]] = defaultdict(list)
    for rank, record in facts.everywhere(Phase.BATCH, Role.RNG):
        if record.key.step >= 0:
            found[rank, record.key.slot].append(record)
    return found


def _used(states: _States) -> Mapping[str, set[int]]:
    """Return, by generator, the steps in which some rank drew from it: its state moved until the next."""
    used: dict[str, set[int]] = defaultdict(set)
    for (_, slot), records in states.items():
        for before, after in pairwise(records):
            if before.digest.fingerprint != after.digest.fingerprint:
                used[slot].add(before.key.step)
    return used


def _expert_group(where: RankCoordinates) -> tuple[int, ...]:
    """Return what ranks have in common that hold different experts, or different parts of one."""
    return (where.pp_rank, where.dp_rank // max(where.ep_size, 1), where.cp_rank)


def _groups(
    facts: RunFacts,
    states: _States,
    used: Mapping[str, set[int]],
    slots: Sequence[str],
    group_of: Callable[[RankCoordinates], tuple[int, ...]],
) -> Iterator[list[tuple[int, TensorRecord]]]:
    """Yield the states of each group at the start of each step that draws from them."""
    groups: dict[tuple[object, ...], list[tuple[int, TensorRecord]]] = defaultdict(list)
    for (rank, slot), records in states.items():
        for record in records:
            if slot in slots and record.key.step in used[slot]:
                groups[group_of(facts.ranks[rank].coordinates), slot, record.key.step].append((rank, record))
    return (members for members in groups.values() if len(members) > 1)


def _finding(
    facts: RunFacts, id_: str, wrong: Sequence[Sequence[tuple[int, TensorRecord]]], title: str, remedy: str
) -> Finding:
    places = [Found(rank=members[0][0], record=members[0][1]) for members in wrong]
    first = in_execution_order(facts, places)[0]
    members = next(group for group in wrong if group[0][1] is first.record)
    ranks = ", ".join(str(rank) for rank, _ in members)
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.98,
        title=title,
        evidence=(
            f"{first.record.key.slot} on ranks {ranks} at the start of step {first.record.key.step}, which "
            "draws from it",
            steps_text(group[0][1].key.step for group in wrong),
        ),
        remedy=remedy,
        where=first.record.key,
    )


_DEAD, _STILL = "a module", "a generator"


def _generators_where_no_module_shows_it(
    findings: Sequence[Partial], exercised: int, failed: int
) -> tuple[Sequence[Partial], int]:
    dead = [one for one in findings if one.kind == _DEAD]
    return (dead, sum(one.count for one in dead)) if dead else (findings, failed)


@invariant(
    "rng.dropout_stopped",
    holds="what draws random numbers in one step of training draws them in every later one",
    unit="generators and dropout modules",
    span=[each_rank()],
    settle=_generators_where_no_module_shows_it,
)
def dropout_stopped(facts: RunFacts) -> Answer:
    """Find dropout that was on and is off: a module that passes its input on, a generator at rest."""
    modules, dead = _dropout_modules(facts)
    drawn, still = _still_generators(facts)
    looked = modules + drawn
    findings = tuple(
        _stopped(facts, found, kind) for found, kind in ((dead, _DEAD), (still, _STILL)) if found
    )
    return Answer(exercised=looked, applies=looked > 0, failed=len(dead) + len(still), findings=findings)


def _stopped(facts: RunFacts, places: Sequence[Found], kind: str) -> Partial:
    found = in_execution_order(facts, places)
    first = found[0]
    finding = Finding(
        id="rng.dropout_stopped",
        severity=Severity.ERROR,
        confidence=0.9,
        title="dropout was on and is off from some step on",
        evidence=(f"rank {first.rank}, {first.record.key.describe()}: {first.text}", f"{len(found)} places"),
        remedy="an evaluation must leave train mode and probabilities as they were: model.train() after it, "
        "no assignment to dropout.p",
        where=first.record.key,
    )
    return seen_first(first, facts, finding, count=len(found), kind=kind)


def _dropout_modules(facts: RunFacts) -> tuple[int, list[Found]]:
    """Return how many dropout modules were on, and calls of those that passed their input on later."""
    outputs: dict[tuple[int, str], list[tuple[TensorRecord, bool]]] = defaultdict(list)
    for rank in facts.ranks:
        inputs = {call_of(r): r for r in facts.of(rank, Phase.FPROP, Role.INPUT, slot="0") if is_dropout(r)}
        for record in facts.of(rank, Phase.FPROP, Role.OUTPUT, slot="0"):
            given = inputs.get(call_of(record)) if is_dropout(record) else None
            if given is not None:
                outputs[rank, record.key.fqn].append((record, given.digest.same_bits(record.digest)))
    dead = []
    on = {place: calls for place, calls in outputs.items() if not all(same for _, same in calls)}
    for (rank, _), calls in on.items():
        last = max(index for index, (_, same) in enumerate(calls) if not same)
        was_on = next(index for index, (_, same) in enumerate(calls) if not same)
        off = next((record for record, same in calls[was_on:] if same), None)
        if off is not None and all(same for _, same in calls[last + 1 :]) and last + 1 < len(calls):
            record = calls[last + 1][0]
            dead.append(Found(rank=rank, record=record, text="its output has the bits of its input"))
    return len(on), dead


def is_dropout(record: TensorRecord) -> bool:
    """Tell whether a record is of a dropout module, by its name."""
    return "dropout" in record.key.fqn.rpartition(".")[2]


def call_of(record: TensorRecord) -> tuple[object, ...]:
    """Return what tells the calls of modules of one rank apart."""
    key = record.key
    return key.step, key.microbatch, key.fqn, key.occurrence, key.recomputed


def _still_generators(facts: RunFacts) -> tuple[int, list[Found]]:
    """Return how many generators of Megatron's were drawn from, and where one stands still for good."""
    drawn, still = 0, []
    for (rank, slot), records in states_of(facts).items():
        if slot not in (*ALIKE, *APART):
            continue
        moved = [before.digest.fingerprint != after.digest.fingerprint for before, after in pairwise(records)]
        if True not in moved:
            continue
        drawn += 1
        last = len(moved) - 1 - moved[::-1].index(True)
        if last + 1 < len(moved):
            record = records[last + 1]
            still.append(
                Found(rank=rank, record=record, text="the step draws no number from it, earlier ones did")
            )
    return drawn, still


@invariant(
    "rng.moved_between_steps",
    holds="nothing between two steps (an evaluation) draws from the generators of training",
    unit="steps",
    span=[whole_run((Phase.BATCH, Role.RNG))],
)
def resting_between_steps(facts: RunFacts) -> Answer:
    """Repeat what the run noticed of its own generators, between the end of a step and the next one."""
    states = [slot for _, slot in states_of(facts) if slot in (*APART, _EXPERTS)]
    if not states:
        return Answer(exercised=0, applies=False)
    told = [entry for entry in reported_entries(facts.run) if entry.get("id") == "rng.moved_between_steps"]
    findings = tuple(reported_finding(entry, "the run") for entry in told[:1])
    return Answer(exercised=max(len(facts.steps) - 1, 0), findings=findings, failed=len(told))
