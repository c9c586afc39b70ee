"""Rules over a launch, as data: ``configs/preflight/*.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from packaging.requirements import Requirement

from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.launches.conditions import UndecidedError, evaluate, names_of
from mindspeed_precision.preflight.planned import Planned
from mindspeed_precision.records import Finding, Severity
from mindspeed_precision.verify.registry import Answer

FILES = ("contradictions", "divisibility", "randomness")
_CERTAIN = 1.0


@dataclass
class _Rule:
    id: str = ""
    name: str = ""
    severity: str = "warning"
    when: str = ""
    title: str = ""
    reason: str = ""
    remedy: str = ""
    source: str = ""
    backends: list[str] = field(default_factory=list)
    requires: list[str] = field(default_factory=list)


@dataclass
class _Schema:
    schema: int = 0
    rules: list[_Rule] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        id: of the finding that it gives.
        name: of the rule, unique.
        severity: of the finding.
        when: condition under which it speaks (``launches.conditions``).
        title: the finding in one sentence.
        reason: why it matters; ``{setting}`` is replaced by its value.
        remedy: what to change.
        source: where that is known from.
        backends: on which it means something; empty: on all.
        requires: ``package<1.0`` specifiers that must hold where the package is installed.
    """

    id: str
    name: str
    severity: Severity
    when: str
    title: str
    reason: str
    remedy: str
    source: str
    backends: tuple[str, ...]
    requires: tuple[str, ...]

    def applies(self, planned: Planned) -> bool:
        """Tell whether it means something for this backend and these versions."""
        if self.backends and planned.backend not in self.backends:
            return False
        wanted = map(Requirement, self.requires)
        return all(
            one.name not in planned.versions
            or one.specifier.contains(planned.versions[one.name], prereleases=True)
            for one in wanted
        )

    def evidence(self, planned: Planned) -> str:
        """Return why it speaks, with the rule that does."""
        values = {name: planned.value(name) for name in names_of(self.when)}
        return f"{self.reason.format(**values)} ({self.name}; {self.source})"


@lru_cache(maxsize=1)
def rules() -> tuple[Rule, ...]:
    """Read every rule.

    Raises:
        ConfigError: a file is none of rules.
    """
    found = []
    for name in FILES:
        path = data_directory("configs") / "preflight" / f"{name}.yaml"
        plain = read_document(path, _Schema, kind="list of rules", remedy="see docs/preflight.md")
        for rule in plain["rules"]:
            lists = {key: tuple(rule[key]) for key in ("backends", "requires")}
            found.append(Rule(**{**rule, **lists, "severity": Severity(rule["severity"])}))
    return tuple(found)


def ask(chosen: Iterable[Rule], planned: Planned) -> Answer:
    """Ask some rules of one finding id; what they say with one severity and title is one finding."""
    if not planned.launch.script and not planned.launch.arguments.given:
        return Answer(exercised=0, applies=False)  # the environment alone is examined
    spoke: list[Rule] = []
    decided = 0
    undecided: list[str] = []
    for rule in chosen:
        if not rule.applies(planned):
            continue
        try:
            spoken = evaluate(rule.when, planned.value)
        except UndecidedError as error:
            undecided.append(f"{rule.name} (no number for {error})")
            continue
        decided += 1
        if spoken:
            spoke.append(rule)
    return Answer(
        exercised=decided,
        failed=len(spoke),
        findings=tuple(_findings(spoke, planned)),
        skipped=f"not decided: {', '.join(undecided)}" if undecided else "",
        applies=bool(decided or undecided),
    )


def _findings(spoke: list[Rule], planned: Planned) -> Iterable[Finding]:
    groups: dict[tuple[Severity, str], list[Rule]] = {}
    for rule in spoke:
        groups.setdefault((rule.severity, rule.title), []).append(rule)
    for (severity, title), members in groups.items():
        yield Finding(
            id=members[0].id,
            severity=severity,
            confidence=_CERTAIN,
            title=title,
            evidence=tuple(rule.evidence(planned) for rule in members),
            remedy=members[0].remedy,
        )
