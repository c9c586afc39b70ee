"""What was asked for is what is used: arguments against configuration objects, modules and the optimizer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mindspeed_precision.config import DROP
from mindspeed_precision.meanings import Effect, load_meanings
from mindspeed_precision.records import Finding, Phase, RecordKey, Role, Severity
from mindspeed_precision.verify.forwarded import Lost, lost_arguments
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts

_ID = "config.not_in_effect"
_APPLIED = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_eps", "weight_decay": "weight_decay"}
_OTHER_OPTIMIZERS = ("muon", "lion", "soap", "sgd")
_NUMERICALLY = 1e-6
_DROPOUTS = {"attention_dropout": "attention_dropout", "embedding_dropout": "hidden_dropout"}
_EPSILONS = ("eps", "epsilon", "variance_epsilon")
_REMEDY = (
    "hand the argument on where the object is built; look for a default that wins, or a patch that misses"
)


@invariant(
    _ID,
    holds="every argument has its value in the configuration objects, modules and optimizer that use it",
    unit="arguments and numbers",
)
def in_effect(facts: RunFacts) -> Answer:
    """Compare what was asked for with what the run's objects hold, and with what the optimizer applied."""
    looked, lost, skipped = lost_arguments(facts.config)
    findings = [_lost(one) for one in lost]
    for check in (_applied, _modules, _recomputed):
        count, found = check(facts)
        looked += count
        findings += found
    if not looked:
        skipped = skipped or "the run recorded no arguments and no configuration objects"
    return Answer(exercised=looked, findings=tuple(findings), skipped=skipped)


def _lost(lost: Lost) -> Finding:
    meaning = load_meanings().argument(lost.copy.argument)
    changes = meaning is None or meaning.effect is Effect.CHANGES
    return Finding(
        id=_ID,
        severity=Severity.ERROR if changes else Severity.WARNING,
        confidence=0.9,
        title=f"{lost.copy.argument} never reached the {lost.copy.section}",
        evidence=(lost.line, *(() if meaning is None else (meaning.reason,))),
        remedy=_REMEDY,
    )


def requested_numbers(config: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return by the optimizer's name what it was asked to apply; what cannot be told is left out.

    Where parameters have numbers of their own (muP), or another optimizer than Adam has its own, nothing is
    expected. Weight decay that grows is the schedule's.
    """
    asked = config.get("megatron_args") or config.get("optimizer_config") or {}
    name = str(asked.get("optimizer", "adam")).lower()
    if any(other in name for other in _OTHER_OPTIMIZERS):
        return {}
    found = {slot: asked[argument] for slot, argument in _APPLIED.items() if _number(asked.get(argument))}
    growing = asked.get("start_weight_decay") != asked.get("end_weight_decay")
    if growing or asked.get("weight_decay_incr_style", "constant") != "constant":
        found.pop("weight_decay", None)
    if asked.get("use_mup") or (config.get("transformer_config") or {}).get("use_mup"):
        found.pop("eps", None)
    return {slot: float(value) for slot, value in found.items()}


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _applied(facts: RunFacts) -> tuple[int, list[Finding]]:
    """Compare what the optimizer applied in every step with what it was asked to."""
    asked = requested_numbers(facts.config)
    multipliers = _multipliers(facts)
    apart: dict[tuple[str, float], dict[str, RecordKey]] = defaultdict(dict)
    looked = 0
    for _, record in facts.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER):
        key, value = record.key, record.value
        if key.slot not in asked or value is None:
            continue
        expected = asked[key.slot]
        if key.slot == "weight_decay":
            multiplier = multipliers.get(key.fqn)
            if multiplier is None and value == 0:
                continue  # a group without decay, of an optimizer that names none
            expected *= 1.0 if multiplier is None else multiplier
        looked += 1
        if not math.isclose(value, expected, rel_tol=_NUMERICALLY, abs_tol=1e-300):
            apart[key.slot, value].setdefault(key.fqn, key)
    return looked, [_not_applied(slot, value, asked, found) for (slot, value), found in apart.items()]


def _multipliers(facts: RunFacts) -> dict[str, float]:
    """Return by parameter the multiplier of its weight decay, as its group says."""
    found = {}
    for rank in facts.ranks.values():
        for group in rank.effective.get("groups", ()):
            multiplier = group["settings"].get("wd_mult")
            if _number(multiplier):
                found.update({entry["fqn"]: float(multiplier) for entry in group["parameters"]})
    return found


def _not_applied(
    slot: str, value: float, asked: Mapping[str, float], found: Mapping[str, RecordKey]
) -> Finding:
    first = min(found.values(), key=lambda key: key.step)
    return Finding(
        id=_ID,
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"the optimizer applies {slot} {value:.8g}, asked for was {_APPLIED[slot]}={asked[slot]:.8g}",
        evidence=(f"first: step {first.step}, {first.fqn}", f"{len(found)} parameters"),
        remedy=_REMEDY,
        where=first,
    )


def _modules(facts: RunFacts) -> tuple[int, list[Finding]]:
    """Compare the epsilons of norms and the probabilities of dropouts with the model's configuration."""
    config = facts.config.get("transformer_config") or {}
    looked, lines = 0, []
    for module in _held(facts):
        for attribute, argument, expected in _expected(module, config, zeroed=_zeroed(facts)):
            looked += 1
            held = module["values"][attribute]
            if _number(held) and not math.isclose(held, expected, rel_tol=_NUMERICALLY):
                lines.append((module["fqn"], f"{attribute}={held}, asked for was {argument}={expected}"))
    return looked, [_held_otherwise(fqn, said) for fqn, said in dict(lines).items()]


def _held(facts: RunFacts) -> Iterable[dict[str, Any]]:
    seen: dict[str, dict[str, Any]] = {}
    for rank in facts.ranks.values():
        for module in rank.effective.get("modules", ()):
            seen.setdefault(repr(module), module)
    return seen.values()


def _zeroed(facts: RunFacts) -> bool:
    settings = facts.run.manifest.get("settings")
    pins = settings.get("determinism", {}) if isinstance(settings, dict) else {}
    return bool(pins.get("enabled", False) and pins.get("zero_dropout", False))


def _expected(
    module: Mapping[str, Any], config: Mapping[str, Any], *, zeroed: bool
) -> Iterator[tuple[str, str, float]]:
    """Yield attribute, argument and value of what the configuration says of one module of the decoder."""
    name, fqn = module["class"].rpartition(".")[2], module["fqn"]
    ours = fqn.startswith(("decoder.", "embedding.")) and "indexer" not in fqn
    epsilon = config.get("layernorm_epsilon")
    if ours and "Norm" in name and "L2" not in name and _number(epsilon):
        for attribute in _EPSILONS:
            if attribute in module["values"]:
                yield attribute, "norm_epsilon", float(config["layernorm_epsilon"])
    argument = _DROPOUTS.get(fqn.rpartition(".")[2])
    if ours and name == "Dropout" and argument and not zeroed and _number(config.get(argument)):
        yield "p", argument, float(config[argument])


def _held_otherwise(fqn: str, said: str) -> Finding:
    return Finding(
        id=_ID,
        severity=Severity.ERROR,
        confidence=0.9,
        title=f"{fqn} does not use what was asked for: {said}",
        remedy=_REMEDY,
        where=RecordKey(step=0, phase=Phase.FPROP, fqn=fqn, role=Role.OUTPUT),
    )


def _recomputed(facts: RunFacts) -> tuple[int, list[Finding]]:
    """Find a full recomputation that was asked for and that no module's call shows."""
    config = facts.config.get("transformer_config") or {}
    settings = facts.run.manifest.get("settings")
    capture = settings.get("capture", {}) if isinstance(settings, dict) else {}
    asked = config.get("recompute_granularity") == "full" and config.get("recompute_method")
    dropped = any(rule.get("level") == DROP for rule in capture.get("rules") or ())
    if not asked or not capture.get("modules", False) or dropped:
        return 0, []
    calls = [record.key for _, record in facts.everywhere(Phase.FPROP, Role.OUTPUT)]
    if not calls or any(key.recomputed for key in calls):
        return len(calls), []
    return len(calls), [
        Finding(
            id=_ID,
            severity=Severity.WARNING,
            confidence=0.7,
            title="recomputation of every layer was asked for, and no module was called again",
            evidence=(f"recompute_granularity=full; {len(calls)} calls, none inside a backward pass",),
            remedy=_REMEDY,
            where=calls[0],
        )
    ]
