"""What was asked for is what is used: arguments against configuration objects, modules, weight decay.

Betas, epsilon and momentum as applied are ``hyperparameters``', the schedule's numbers ``counters``'.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed_precision.config import DROP
from mindspeed_precision.meanings import Effect, load_meanings
from mindspeed_precision.records import Finding, Phase, RecordKey, Role, Severity, TensorRecord
from mindspeed_precision.verify.forwarded import Lost, lost_arguments
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_rank, whole_run

_ID = "config.not_in_effect"
_NUMERICALLY = 1e-6
_DROPOUTS = {"attention_dropout": "attention_dropout", "embedding_dropout": "hidden_dropout"}
_EPSILONS = ("eps", "epsilon", "variance_epsilon")
_REMEDY = (
    "hand the argument on where the object is built; look for a default that wins, or a patch that misses"
)


def _a_call(facts: RunFacts) -> Iterator[tuple[int, TensorRecord]]:
    """Yield a call that was recomputed, or, where none was, the first."""
    calls = list(facts.everywhere(Phase.FPROP, Role.OUTPUT))
    again = next((one for one in calls if one[1].key.recomputed), None)
    yield from calls[:1] if again is None else [again]


@invariant(
    _ID,
    holds="every argument has its value in the configuration objects, modules and groups that use it",
    unit="arguments and numbers",
    span=[
        whole_run(effective=True, ask=lambda facts: _answer(facts, _modules, configured=True)),
        each_rank(lambda facts: _answer(facts, _decayed)),
        whole_run(keep=_a_call, ask=lambda facts: _answer(facts, _recomputed)),
    ],
)
def in_effect(facts: RunFacts) -> Answer:
    """Compare what was asked for with what the run's objects hold, and with what the optimizer applied."""
    return _answer(facts, _decayed, _modules, _recomputed, configured=True)


def _answer(
    facts: RunFacts, *checks: Callable[[RunFacts], tuple[int, Sequence[Finding]]], configured: bool = False
) -> Answer:
    looked, skipped = 0, ""
    findings: list[Finding] = []
    if configured:
        looked, lost, skipped = lost_arguments(facts.config)
        findings += map(_lost, lost)
    for check in checks:
        count, found = check(facts)
        looked += count
        findings += found
    if configured and not looked:
        skipped = skipped or "no arguments and no configuration objects were recorded"
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


def requested_decay(config: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the weight decay that was asked for of every step; None: nothing says, or it grows."""
    asked = config.get("megatron_args") or config.get("optimizer_config") or {}
    decay = asked.get("weight_decay")
    growing = asked.get("start_weight_decay") != asked.get("end_weight_decay")
    style = asked.get("weight_decay_incr_style", "constant")
    if not isinstance(decay, (int, float)) or growing or style != "constant":
        return None
    return float(decay)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _decayed(facts: RunFacts) -> tuple[int, list[Partial]]:
    """Compare the weight decay of every step with what was asked for, times the group's multiplier."""
    asked = requested_decay(facts.config)
    if asked is None:
        return 0, []
    multipliers = _multipliers(facts)
    apart: dict[tuple[float, float], dict[str, tuple[int, TensorRecord]]] = defaultdict(dict)
    looked = 0
    for rank, record in facts.everywhere(Phase.OPTIMIZER, Role.HYPERPARAMETER):
        key, value = record.key, record.value
        if key.slot != "weight_decay" or value is None:
            continue
        multiplier = multipliers.get(key.fqn)
        if multiplier is None and value == 0:
            continue  # a group without decay, of an optimizer that names none
        looked += 1
        expected = asked * (1.0 if multiplier is None else multiplier)
        if not math.isclose(value, expected, rel_tol=_NUMERICALLY, abs_tol=1e-300):
            apart[value, expected].setdefault(key.fqn, (rank, record))
    return looked, [_not_applied(value, expected, found) for (value, expected), found in apart.items()]


def _multipliers(facts: RunFacts) -> dict[str, float]:
    """Return by parameter the multiplier of its weight decay, as its group says."""
    found = {}
    for rank in facts.ranks.values():
        for group in rank.effective.get("groups", ()):
            multiplier = group["settings"].get("wd_mult")
            if _number(multiplier):
                found.update({entry["fqn"]: float(multiplier) for entry in group["parameters"]})
    return found


def _not_applied(value: float, expected: float, found: Mapping[str, tuple[int, TensorRecord]]) -> Partial:
    rank, record = min(found.values(), key=lambda one: one[1].key.step)
    first = record.key
    return Partial(
        id=_ID,
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"the optimizer applies weight_decay {value:.8g} where {expected:.8g} was asked for",
        evidence=(f"first: step {first.step}, {first.fqn}", f"{len(found)} parameters"),
        remedy=_REMEDY,
        where=first,
        order=(first.step, rank, record.seq),
        kind=f"{value:.8g} {expected:.8g}",
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
    number = facts.kinds.get((Phase.FPROP, Role.OUTPUT), 0)
    if not calls or any(key.recomputed for key in calls):
        return number, []
    return number, [
        Finding(
            id=_ID,
            severity=Severity.WARNING,
            confidence=0.7,
            title="recomputation of every layer was asked for, and no module was called again",
            evidence=(f"recompute_granularity=full; {number} calls, none inside a backward pass",),
            remedy=_REMEDY,
            where=calls[0],
        )
    ]
