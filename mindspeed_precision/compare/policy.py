"""What counts as aligned: policies are data (``configs/policies/*.yaml``), frozen once they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_precision.config import data_directory
from mindspeed_precision.errors import ConfigError

DEFAULT_POLICY = "exact"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One bound on one metric.

    Attributes:
        metric: a name of ``compare.metrics``.
        minimum: smallest value that is aligned.
        maximum: largest value that is aligned.
    """

    metric: str
    minimum: float = -math.inf
    maximum: float = math.inf

    def holds(self, value: float) -> bool:
        """Tell whether ``value`` is within the bound; NaN never is."""
        return self.minimum <= value <= self.maximum

    def describe(self) -> str:
        """Return the bound as a person would write it."""
        return (
            f"{self.metric} >= {self.minimum:g}"
            if self.maximum == math.inf
            else f"{self.metric} <= {self.maximum:g}"
        )


@dataclass(frozen=True, kw_only=True)
class RecordRule:
    """Bounds for the records of some dtypes.

    Attributes:
        dtype: shell pattern.
        every: all limits must hold (and be known); else the first one that is known decides.
        limits: the bounds.
    """

    dtype: str
    every: bool
    limits: tuple[Limit, ...]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When two records, and two runs, are aligned.

    Attributes:
        name: name of the file.
        title: what it demands, in one phrase.
        rules: bounds by dtype, first one that fits; none: bits must be equal.
        max_mean_relative_loss_error: bound on the mean over the steps of the loss's relative error; None:
            no bound.
    """

    name: str
    title: str
    rules: tuple[RecordRule, ...] = ()
    max_mean_relative_loss_error: float | None = None

    @property
    def exact(self) -> bool:
        """Whether only equal bits are aligned."""
        return not self.rules

    def rule_for(self, dtype: str) -> RecordRule | None:
        """Return the bounds for records of ``dtype``; None: bits must be equal."""
        return next((rule for rule in self.rules if fnmatchcase(dtype, rule.dtype)), None)


@dataclass
class _Limit:
    metric: str = ""
    minimum: float = -math.inf
    maximum: float = math.inf


@dataclass
class _Rule:
    dtype: str = "*"
    every: bool = True
    limits: list[_Limit] = field(default_factory=list)


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
    try:
        merged = OmegaConf.merge(OmegaConf.structured(_Schema), OmegaConf.load(path))
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            str(error).splitlines()[0], where=str(path), remedy="see configs/policies"
        ) from error
    except Exception as error:
        raise ConfigError(
            "not readable as YAML",
            where=str(path),
            found=" ".join(str(error).split())[:120],
            expected="a policy",
        ) from error
    assert isinstance(plain, dict)
    return _freeze(path, {str(key): value for key, value in plain.items()})


def _directory() -> Path:
    return data_directory("configs") / "policies"


def _freeze(path: Path, plain: Mapping[str, Any]) -> Policy:
    if plain["schema"] != 1:
        raise ConfigError(
            "another version of the policy format", where=str(path), found=str(plain["schema"]), expected="1"
        )
    rules = tuple(
        RecordRule(
            dtype=rule["dtype"], every=rule["every"], limits=tuple(Limit(**limit) for limit in rule["limits"])
        )
        for rule in plain["rules"]
    )
    return Policy(name=path.stem, title=plain["title"], rules=rules, **plain["run"])
