"""Rules about the optimizer: the numbers it used, clipping, its state, its update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from mindspeed_precision.diagnose.facts import Facts, fqns, names, pair_of
from mindspeed_precision.diagnose.graph import Node
from mindspeed_precision.diagnose.rules.layouts import unseen_sums, updates_unseen
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.diagnose.rules.unmoved import follows
from mindspeed_precision.records import Finding, Origin, Phase, Role, Severity

_KNOWN = {
    "weight_decay": (
        "optimizer.weight_decay",
        "the parameter groups (no_weight_decay_cond) and --weight-decay",
    ),
    "lr": ("optimizer.lr", "--lr, --min-lr, the schedule and lr_mult of the parameter groups"),
    "eps": ("optimizer.eps", "--adam-eps"),
    "beta1": ("optimizer.beta", "--adam-beta1"),
    "beta2": ("optimizer.beta", "--adam-beta2"),
}


@rule("optimizer.weight_decay", "optimizer.lr", "optimizer.eps", "optimizer.beta", "optimizer.hyperparameter")
def hyperparameters(facts: Facts) -> Iterable[Finding]:
    """Find numbers that the optimizer used differently: one finding per group with one change."""
    groups: dict[tuple[str, float | None, float | None], list[Origin]] = defaultdict(list)
    for origin in facts.origins_in(Phase.OPTIMIZER, Role.HYPERPARAMETER):
        if follows(facts, origin.key):
            continue
        pair = pair_of(origin.comparison)
        groups[origin.key.slot, pair.baseline.value, pair.candidate.value].append(origin)
    for (slot, one, two), origins in groups.items():
        id_, place = _KNOWN.get(slot, ("optimizer.hyperparameter", "the optimizer's arguments"))
        total = {
            node.key.fqn
            for node in facts.graph.all.nodes
            if node.key.role is Role.HYPERPARAMETER and node.key.slot == slot
        }
        members = list(dict.fromkeys(origin.key.fqn for origin in origins))
        which = "all" if len(members) == len(total) else f"{len(members)} of {len(total)}"
        yield Finding(
            id=id_,
            severity=Severity.ERROR,
            confidence=0.97,
            title=f"{slot} is {_number(one)} in the baseline and {_number(two)} in the candidate, "
            f"for {which} parameters",
            evidence=(
                f"used at step {origins[0].key.step} for {names(members)}",
                "read from what the optimizer used, not from the arguments",
            ),
            remedy=f"compare {place} of both runs",
            where=origins[0].key,
            explains=tuple(origin.key for origin in origins),
        )


def _number(value: float | None) -> str:
    return "another number (no statistics were kept)" if value is None else f"{value:.10g}"


def _known(facts: Facts, origin: Origin, unseen: Sequence[Node]) -> bool:
    """Tell whether another rule has the cause: a parameter that did not move, or a sum that was misread."""
    return follows(facts, origin.key) or updates_unseen(origin.key, unseen)


@rule("optimizer.grad_norm", "optimizer.clip", "optimizer.state", "optimizer.update")
def arithmetic(facts: Facts) -> Iterable[Finding]:
    """Find steps of the optimizer that give another result from the same inputs."""
    unseen = unseen_sums(facts)
    for id_, phase, roles, what, remedy in (
        (
            "optimizer.grad_norm",
            Phase.CLIP,
            (Role.GRAD_NORM,),
            "the gradient norm differs although no reduced gradient does",
            "compare which parameters each run counts (duplicates, shared embeddings) and the "
            "dtype of the sum",
        ),
        (
            "optimizer.clip",
            Phase.CLIP,
            (Role.MAIN_GRAD,),
            "clipping gives another gradient from the same gradient and norm",
            "compare --clip-grad of both runs, and the formula of the factor",
        ),
        (
            "optimizer.state",
            Phase.OPTIMIZER,
            (Role.EXP_AVG, Role.EXP_AVG_SQ),
            "the optimizer's state differs although gradient and hyperparameters do not",
            "compare what was loaded or reset (state, step counter), the dtype of the state and "
            "the optimizer itself",
        ),
        (
            "optimizer.update",
            Phase.OPTIMIZER,
            (Role.PARAM, Role.MASTER_PARAM),
            "the update gives other parameters from the same state, gradient and hyperparameters",
            "compare the optimizer's implementation (fused or not), step counter and the cast of "
            "the master weights",
        ),
    ):
        origins = [o for o in facts.origins_in(phase, *roles) if not _known(facts, o, unseen)]
        if origins:
            yield Finding(
                id=id_,
                severity=Severity.ERROR,
                confidence=0.75,
                title=f"{what}: {fqns(origins)}",
                evidence=(
                    origins[0].inputs,
                    f"first: {origins[0].key.describe()}, {origins[0].comparison.reason}",
                ),
                remedy=remedy,
                where=origins[0].key,
                explains=tuple(origin.key for origin in origins),
            )
