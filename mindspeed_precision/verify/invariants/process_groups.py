"""The process group of a collective is one of the parallel layout's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial

from mindspeed_precision.record.process_group import ranks_of_note
from mindspeed_precision.records import Finding, Phase, RankCoordinates, Role, Severity, TensorRecord
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.places import Found, in_execution_order, of_collective, seen_first
from mindspeed_precision.verify.process_groups import Flaw, grid_of
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank

_GIVEN = ((Phase.FPROP, Role.INPUT), (Phase.DGRAD, Role.GRAD_OUTPUT), (Phase.REDUCE, Role.MAIN_GRAD))
_SPLITTING = (
    "num_distributed_optimizer_instances",
    "hierarchical_context_parallel_sizes",
    "hybrid_context_parallel",
    "dynamic_context_parallel",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "use_torch_fsdp2",
)
"""Settings of Megatron under which collectives work on parts of the layout's groups."""


@invariant(
    "parallel.foreign_group",
    holds="collectives work on groups that the parallel layout has",
    unit="collectives",
    span=[each_rank()],
)
def groups_of_the_layout(facts: RunFacts) -> Answer:
    """Judge the group of every collective that was recorded with one."""
    coordinates = facts.coordinates
    if max(where.world_size for where in coordinates.values()) == 1:
        return Answer(exercised=0, applies=False)
    grid = grid_of(coordinates, _expert_tensor(facts))
    if isinstance(grid, str):
        return Answer(exercised=0, skipped=grid)
    lawful, looked = _lawful(facts), 0
    left: Counter[str] = Counter()
    found: dict[Severity, list[Found]] = defaultdict(list)
    for rank, record in _collectives(facts):
        group = ranks_of_note(record.note)
        if not group:
            left["their group was not recorded"] += 1
            continue
        if not coordinates.keys() >= set(group):
            left["their group has ranks that the world does not have"] += 1
            continue
        text, flaw = facts.once(("group", group), partial(grid.judge, group))
        if flaw in lawful:
            left[f"they work on a part of a group, and {lawful[flaw]}"] += 1
            continue
        looked += 1
        if flaw is not None:
            severity = Severity.WARNING if flaw is Flaw.PART else Severity.ERROR
            found[severity].append(Found(rank=rank, record=record, text=f"{record.note}: {text}"))
    skipped = "; ".join(f"{count} collectives: {reason}" for reason, count in left.items())
    return Answer(
        exercised=looked,
        findings=tuple(
            _finding(facts, found[severity], severity)
            for severity in (Severity.ERROR, Severity.WARNING)
            if found[severity]
        ),
        failed=sum(map(len, found.values())),
        skipped=skipped or ("" if looked else "no collective was recorded (capture.collectives)"),
    )


def _collectives(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    for kind in _GIVEN:
        for rank, record in facts.everywhere(*kind):
            if of_collective(record):
                yield rank, record


def _expert_tensor(facts: RunFacts) -> int | None:
    size = facts.config.get("transformer_config", {}).get("expert_tensor_parallel_size")
    return size if isinstance(size, int) and size > 0 else None


def _lawful(facts: RunFacts) -> Mapping[Flaw | None, str]:
    """Return why groups of some kinds may be meant."""
    arguments = facts.config.get("megatron_args", {})
    versions = facts.run.manifest.get("versions")
    if "context_parallel_algo" in arguments or "mindspeed" in (
        versions if isinstance(versions, dict) else ()
    ):
        reason = "MindSpeed splits groups further"
        return {Flaw.PART: reason, Flaw.MIXED: reason}
    if not facts.config.get("ddp_config"):
        return {Flaw.PART: "the configuration of Megatron's DDP was not recorded"}
    for section in ("megatron_args", "ddp_config", "transformer_config"):
        for name in _SPLITTING:
            value = facts.config.get(section, {}).get(name)
            if value is True or value not in (None, False, 0, 1):
                return {Flaw.PART: f"{name} is set"}
    return {}


def _finding(facts: RunFacts, found: list[Found], severity: Severity) -> Partial:
    ordered = in_execution_order(facts, found)
    first = ordered[0]
    part = severity is Severity.WARNING
    what = "a part of a group of the layout" if part else "a group that the layout does not have"
    where = facts.ranks[first.rank].coordinates
    finding = Finding(
        id="parallel.foreign_group",
        severity=severity,
        confidence=0.7 if part else 0.9,
        title=f"a collective works on {what}",
        evidence=(
            f"rank {first.rank}, {first.record.key.describe()}: {first.text}",
            f"the layout: {_sizes(where)}",
            f"{len(ordered)} collectives",
        ),
        remedy="hand the collective the group of megatron.core.parallel_state that it is meant for",
        where=first.record.key,
    )
    return seen_first(first, facts, finding, count=len(ordered), kind=severity.value)


def _sizes(where: RankCoordinates) -> str:
    sizes = {
        "TP": where.tp_size,
        "CP": where.cp_size,
        "DP": where.dp_size,
        "PP": where.pp_size,
        "EP": where.ep_size,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
