"""The optimizer's numbers are those of the configuration, and decay is kept from norms and biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_precision.records import Phase, Role, Severity, TensorRecord
from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank

_FIELDS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_eps", "momentum": "sgd_momentum"}
_OTHER_OPTIMIZERS = ("muon", "lion", "soap", "sgd")
_SOURCES = (
    ("megatron_args", "asked for by the arguments"),
    ("optimizer_config", "in the optimizer's configuration"),
)


@invariant(
    "optimizer.not_as_configured",
    holds="betas, eps and momentum as applied are those that were asked for",
    unit="hyperparameters",
    span=[each_rank()],
)
def numbers_are_as_configured(facts: RunFacts) -> Answer:
    """Compare each number that the optimizer was seen to use with the arguments and its configuration."""
    failures, exercised = [], 0
    for number, record in facts.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER):
        wanted = list(_wanted(facts, record))
        exercised += bool(wanted)
        other = [f"{value:g} {source}" for value, source in wanted if not _same(record.value, value)]
        if other:
            kind = f"{record.key.slot} is {record.value:g}, not {', '.join(other)}"
            failures.append(failure(record, number, f"{record.value:g}", kind))
    return Answer(
        exercised=exercised,
        findings=findings_of(
            failures,
            id="optimizer.not_as_configured",
            title="the optimizer uses another number than was asked for",
            remedy="forward the argument to the optimizer that is really built; its class has defaults "
            "of its own",
            confidence=0.97,
        ),
        failed=len(failures),
        skipped="" if exercised else "no configuration says which numbers the optimizer should use",
    )


def _wanted(facts: RunFacts, record: TensorRecord) -> Iterator[tuple[float, str]]:
    name = _FIELDS.get(record.key.slot)
    for section, source in _SOURCES:
        asked = facts.config.get(section, {})
        value = asked.get(name) if name and not _of_its_own(asked, record.key.slot) else None
        if isinstance(value, (int, float)) and record.value is not None:
            yield float(value), source


def _of_its_own(asked: Mapping[str, Any], slot: str) -> bool:
    """Tell whether the optimizer has such a number of its own: another one than Adam's, or muP's epsilons."""
    other = any(name in str(asked.get("optimizer", "adam")).lower() for name in _OTHER_OPTIMIZERS)
    return (other and slot != "momentum") or (slot == "eps" and bool(asked.get("use_mup")))


def _same(one: float | None, two: float) -> bool:
    return one is not None and abs(one - two) <= 1e-6 * max(abs(one), abs(two))


@invariant(
    "optimizer.decay_of_norm_or_bias",
    holds="Megatron's parameter groups decay neither biases nor parameters of one dimension",
    unit="parameters",
    span=[each_rank()],
)
def norms_and_biases_are_not_decayed(facts: RunFacts) -> Answer:
    """Look at the weight decay as applied to each bias and each parameter of one dimension."""
    if not facts.config.get("optimizer_config"):
        return Answer(
            exercised=0, skipped="the optimizer is not Megatron's: no rule says what it decays", applies=False
        )
    failures: dict[tuple[int, str], Failure] = {}
    looked: set[tuple[int, str]] = set()
    for number, record in facts.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER):
        parameter = facts.parameters(number).get(record.key.fqn)
        if record.key.slot != "weight_decay" or parameter is None:
            continue
        if not _exempt(facts, parameter.fqn, parameter.shape):
            continue
        looked.add((number, parameter.fqn))
        if record.value:
            found = failure(record, number, f"weight decay {record.value:g} of shape {list(parameter.shape)}")
            failures.setdefault((number, parameter.fqn), found)
    return Answer(
        exercised=len(looked),
        findings=findings_of(
            failures.values(),
            id="optimizer.decay_of_norm_or_bias",
            title="weight decay is applied to norms or biases",
            remedy="give them a group with wd_mult 0 (get_param_groups); a norm of another class, or a "
            "group that lost its wd_mult, is missed",
            severity=Severity.ERROR,
            confidence=0.85,
        ),
        failed=len(failures),
        skipped="" if looked else "no weight decay of a norm or a bias was recorded",
    )


def _exempt(facts: RunFacts, fqn: str, shape: tuple[int, ...]) -> bool:
    arguments = facts.config.get("megatron_args", {})
    optimizer = facts.config.get("optimizer_config", {})
    if "q_layernorm" in fqn or "k_layernorm" in fqn:
        return not (arguments.get("apply_wd_to_qk_layernorm") or optimizer.get("apply_wd_to_qk_layernorm"))
    return fqn.endswith(".bias") or len(shape) == 1
