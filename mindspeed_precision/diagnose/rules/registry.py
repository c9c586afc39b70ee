"""Where rules register, so that every finding id is known and documented (``docs/findings.md``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.records import Finding, RecordKey

Rule = Callable[[Facts], Iterable[Finding]]
LateRule = Callable[[Facts, Sequence[Finding]], Iterable[Finding]]


@dataclass(frozen=True, kw_only=True)
class _Registered:
    ids: tuple[str, ...]
    rule: LateRule
    late: bool


_RULES: list[_Registered] = []
_ELSEWHERE: set[str] = set()


def rule(*ids: str) -> Callable[[Rule], Rule]:
    """Register a rule, with every id that it may give."""

    def register(function: Rule) -> Rule:
        _RULES.append(_Registered(ids=ids, rule=lambda facts, _: function(facts), late=False))
        return function

    return register


def late_rule(*ids: str) -> Callable[[LateRule], LateRule]:
    """Register a rule that looks at what the other rules found."""

    def register(function: LateRule) -> LateRule:
        _RULES.append(_Registered(ids=ids, rule=function, late=True))
        return function

    return register


def given_elsewhere(id_: str) -> str:
    """Announce a finding that no rule gives: it is about runs as recorded, not as compared."""
    _ELSEWHERE.add(id_)
    return id_


def finding_ids() -> frozenset[str]:
    """Return every id that a comparison may give."""
    return frozenset(id_ for registered in _RULES for id_ in registered.ids) | _ELSEWHERE


def run_rules(facts: Facts) -> list[Finding]:
    """Apply every rule, the late ones in the order of their registration after the others."""
    findings: list[Finding] = []
    for registered in sorted(_RULES, key=lambda entry: entry.late):
        found = list(registered.rule(facts, findings))
        assert {finding.id for finding in found} <= set(registered.ids), registered.ids
        findings += found
    return findings


def unexplained(facts: Facts, findings: Sequence[Finding]) -> list[RecordKey]:
    """Return the keys of the origins that no finding accounts for."""
    explained = {key for finding in findings for key in finding.explains}
    return [origin.key for origin in facts.origins if origin.key not in explained]
