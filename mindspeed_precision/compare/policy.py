"""What counts as aligned: policies are data (``configs/policies/*.yaml``), frozen once they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_precision.config import data_directory, read_document
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import RecordKey, Role

DEFAULT_POLICY = "exact"
"""For two runs of one framework."""

CROSS_POLICY = "cross_framework"
"""For runs of different frameworks, whose kernels sum in different orders."""

LAYOUT_POLICY = "cross_layout"
"""For runs of different parallel layouts, which sum in different orders."""

EXACT_ROLES = frozenset({Role.HYPERPARAMETER, Role.BATCH, Role.RNG})
"""What a run is given rather than computes: no rounding excuses a difference."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One bound on one metric.

    Attributes:
        metric: a name of ``compare.metrics``.
        minimum: smallest value that is aligned.
        maximum: largest value that is aligned, where both runs start alike.
        rounding: added to ``maximum`` times the rounding that a record has behind it (``compare.depth``).
        growth: added to it times the reach of the optimizer (``compare.reach``): rounding noise that went
            through an update.
        source: where the bound comes from, if not from the policy: ``calibrated``.
    """

    metric: str
    minimum: float = -math.inf
    maximum: float = math.inf
    rounding: float = 0.0
    growth: float = 0.0
    source: str = ""

    def at(self, *, reach: float, unit: float) -> Limit:
        """Return the bound for a record.

        Args:
            reach: of the updates before it.
            unit: of rounding that it has behind it.
        """
        maximum = self.maximum + self.rounding * unit + self.growth * reach
        return replace(self, maximum=maximum, rounding=0.0, growth=0.0)

    def holds(self, value: float) -> bool:
        """Tell whether ``value`` is within the bound; NaN never is."""
        return self.minimum <= value <= self.maximum

    def share(self, value: float) -> float:
        """Return how much of what is allowed ``value`` takes; 1 is the bound, NaN is beyond any."""
        least = self.maximum == math.inf
        used, room = (1 - value, 1 - self.minimum) if least else (value, self.maximum)
        if math.isnan(used):
            return math.inf
        if used <= 0:
            return 0.0
        return used / room if room > 0 else math.inf

    def describe(self) -> str:
        """Return the bound as a person would write it."""
        least = self.maximum == math.inf
        said = f"{self.metric} >= {self.minimum:g}" if least else f"{self.metric} <= {self.maximum:g}"
        return f"{said} ({self.source})" if self.source else said


@dataclass(frozen=True, kw_only=True)
class RecordRule:
    """Bounds for some records; without any limit their bits must be equal.

    Attributes:
        dtype: shell pattern.
        phase: shell pattern.
        model: shell pattern on the dtype of the model's parameters: what is kept in float32 of a bfloat16
            model is no more exact than what it was computed from.
        role: shell pattern. Settings, data and random state are bounded only by a rule that names their role.
        every: all limits must hold (and be known); else the first one that is known decides.
        limits: the bounds.
        without_elements: bounds of which all must hold where no elements were kept; none: ``limits`` decide.
            Those on an end of an estimate hold where sketches give one.
        cancels_below: a gradient smaller than this times the magnitude of what was summed is noise; 0: none.
        cancels_growth: added to it times the reach, where the sign of a gradient decides (parameters).
        max_gain_change: largest relative change of what the reduction multiplies a gradient by, where
            nothing is summed in it (``compare.gain``); 0: not looked at.
        cancels_in_part: shell pattern of parameters whose gradient may be noise in some elements, which
            without elements nothing shows.
    """

    dtype: str = "*"
    model: str = "*"
    phase: str = "*"
    role: str = "*"
    every: bool = True
    limits: tuple[Limit, ...] = ()
    without_elements: tuple[Limit, ...] = ()
    cancels_below: float = 0.0
    cancels_growth: float = 0.0
    max_gain_change: float = 0.0
    cancels_in_part: str = ""

    def applies(self, key: RecordKey, dtype: str, model: str) -> bool:
        """Tell whether the rule speaks of a record."""
        named = key.role not in EXACT_ROLES or self.role == key.role.value
        patterns = (
            (dtype, self.dtype),
            (model, self.model),
            (key.phase.value, self.phase),
            (key.role.value, self.role),
        )
        return named and all(fnmatchcase(text, pattern) for text, pattern in patterns)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When two records, and two runs, are aligned.

    Attributes:
        name: name of the file.
        title: what it demands, in one phrase.
        rules: bounds, first one that fits; none: bits must be equal.
        max_mean_relative_loss_error: bound on the mean over the steps of the loss's relative error; None:
            no bound.
        why: why it was taken, where nobody asked for it.
    """

    name: str
    title: str
    rules: tuple[RecordRule, ...] = ()
    max_mean_relative_loss_error: float | None = None
    why: str = ""

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Every bound on a record."""
        return tuple(limit for rule in self.rules for limit in (*rule.limits, *rule.without_elements))

    @property
    def exact(self) -> bool:
        """Whether only equal bits are aligned."""
        return not self.rules

    def rule_for(self, key: RecordKey, dtype: str, model: str = "") -> RecordRule | None:
        """Return the bounds for a record; None: bits must be equal.

        Args:
            key: of the record.
            dtype: of its elements.
            model: dtype of the model's parameters, where it is known.
        """
        found = next((rule for rule in self.rules if rule.applies(key, dtype, model)), None)
        return found if found is not None and found.limits else None

    def describe(self) -> str:
        """Return name, demand, and why it was taken."""
        return f"{self.name}: {self.title}" + (f" ({self.why})" if self.why else "")


@dataclass
class _Limit:
    metric: str = ""
    minimum: float = -math.inf
    maximum: float = math.inf
    rounding: float = 0.0
    growth: float = 0.0


@dataclass
class _Rule:
    dtype: str = "*"
    model: str = "*"
    phase: str = "*"
    role: str = "*"
    every: bool = True
    limits: list[_Limit] = field(default_factory=list)
    without_elements: list[_Limit] = field(default_factory=list)
    cancels_below: float = 0.0
    cancels_growth: float = 0.0
    max_gain_change: float = 0.0
    cancels_in_part: str = ""


@dataclass
class _Run:
    max_mean_relative_loss_error: float | None = None


@dataclass
class _Schema:
    schema: int = 1
    title: str = ""
    rules: list[_Rule] = field(default_factory=list)
    run: _Run = field(default_factory=_Run)


def policy_names() -> list[str]:
    """Return the names of the shipped policies."""
    return sorted(path.stem for path in _directory().glob("*.yaml"))


def load_policy(name: str) -> Policy:
    """Read a policy.

    Args:
        name: a shipped one (``exact``), or the path of a YAML file.

    Raises:
        ConfigError: there is no such policy, or its file is no policy.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _directory() / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            "no such policy", where="policy", found=name, expected=f"one of {', '.join(policy_names())}"
        )
    status = path.stat()
    return _read_policy(path, (status.st_mtime_ns, status.st_size))


@cache
def _read_policy(path: Path, state: tuple[int, int]) -> Policy:
    """Read a file of that modification time and size: a tenth of a second, so once per process."""
    return _freeze(path, read_document(path, _Schema, kind="policy", remedy="see configs/policies"))


def default_policy(baseline: str, candidate: str, layouts: Sequence[str] = ()) -> Policy:
    """Return the policy for two runs of which nobody said how to compare them.

    Args:
        baseline: name of its framework; empty where its manifest names none.
        candidate: the same.
        layouts: their parallel layouts in words, where they differ.
    """
    if baseline == candidate or not baseline or not candidate:
        if not layouts:
            return load_policy(DEFAULT_POLICY)
        why = f"taken because the baseline ran as {layouts[0]} and the candidate as {layouts[1]}"
        return replace(load_policy(LAYOUT_POLICY), why=why)
    why = f"taken because the baseline ran on {baseline} and the candidate on {candidate}"
    return replace(load_policy(CROSS_POLICY), why=why)


def _directory() -> Path:
    return data_directory("configs") / "policies"


def _freeze(path: Path, plain: Mapping[str, Any]) -> Policy:
    if not plain["title"]:
        raise ConfigError(
            "a policy without a title",
            where=str(path),
            expected="title and rules",
            remedy="see configs/policies",
        )
    rules = tuple(
        RecordRule(**{**rule, **{name: _limits(rule[name]) for name in ("limits", "without_elements")}})
        for rule in plain["rules"]
    )
    return Policy(name=path.stem, title=plain["title"], rules=rules, **plain["run"])


def _limits(plain: list[dict[str, Any]]) -> tuple[Limit, ...]:
    return tuple(Limit(**limit) for limit in plain)
