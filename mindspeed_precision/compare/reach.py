"""How far an optimizer of Adam's kind can have moved a parameter: what rounding noise can have become.

Adam divides a gradient by its own size. Where a gradient is zero in mathematics and noise in practice, the
update is therefore not small but up to the learning rate, with a sign that no two frameworks share. Bounds
after an update are stated in that unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Role

ASSUMED_RATE = 1e-3
"""Learning rate where neither records nor configuration of either run say one."""

_SECTIONS = ("megatron_args", "optimizer_config")


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Sums of learning rates since both runs started alike.

    Attributes:
        rates: the largest learning rate of any parameter, by recorded step.
        first: the first step of the runs.
        rate: learning rate for steps before any recorded one where ``rates`` is empty.
        amplification: largest update in units of the learning rate (1 for gradients that come every step).
        note: what a reader must know of where the rates are from; empty where they were recorded.
        forced: steps that both runs began with one state: each is a start.
    """

    rates: Mapping[int, float]
    first: int
    rate: float
    amplification: float
    note: str
    forced: frozenset[int] = frozenset()

    def start_of(self, step: int) -> int:
        """Return the last step, up to ``step``, that both runs began with one state."""
        return max((one for one in self.forced if one <= step), default=self.first)

    def through(self, step: int) -> float:
        """Return the sum of the learning rates of all steps from a start up to and including ``step``.

        A step that was not recorded counts with the rate of the next recorded one.
        """
        return sum(self._rate_of(one) for one in range(self.start_of(step), step + 1))

    def before(self, step: int) -> float:
        """Return the sum for what a step computes from: the updates between its start and itself."""
        return sum(self._rate_of(one) for one in range(self.start_of(step), step))

    def _rate_of(self, step: int) -> float:
        if step in self.rates:
            return self.rates[step]
        later = next((known for known in self._steps if known > step), None)
        if later is None and self._steps:
            later = self._steps[-1]
        return self.rate if later is None else self.rates[later]

    @cached_property
    def _steps(self) -> list[int]:
        return sorted(self.rates)


def reach_of(runs: Iterable[Run], forced: frozenset[int] = frozenset()) -> Reach:
    """Read the learning rates that two runs recorded, the larger one where they differ.

    The amplification is Kingma and Ba's bound on Adam's step (2015, section 2.1): ``(1 - beta1) /
    sqrt(1 - beta2)`` where that exceeds 1, else 1.
    """
    runs = list(runs)
    rates: dict[int, float] = {}
    amplification = 1.0
    for records in (rank.records for run in runs for rank in run.ranks.values()):
        betas: dict[tuple[int, str], dict[str, float]] = {}
        for record in records:
            key, value = record.key, record.value
            if key.role is not Role.HYPERPARAMETER or value is None or not math.isfinite(value):
                continue
            if key.slot == "lr":
                rates[key.step] = max(rates.get(key.step, 0.0), value)
            elif key.slot in ("beta1", "beta2"):
                betas.setdefault((key.step, key.fqn), {})[key.slot] = value
        for pair in betas.values():
            amplification = max(amplification, _amplification(pair))
    starts = [run.manifest.get("first_step") for run in runs]
    recorded = [step for run in runs for rank in run.ranks.values() for step in rank.steps if step >= 0]
    known = [start for start in starts if type(start) is int and start >= 0]
    rate, note = _configured(runs) if not rates else (0.0, "")
    first = max(known) if known else min(recorded, default=0)
    return Reach(rates=rates, first=first, rate=rate, amplification=amplification, note=note, forced=forced)


def _amplification(betas: Mapping[str, float]) -> float:
    one, two = betas.get("beta1", 0.0), betas.get("beta2", 0.0)
    return (1 - one) / math.sqrt(1 - two) if len(betas) == 2 and two < 1 else 1.0


def _configured(runs: Iterable[Run]) -> tuple[float, str]:
    """Return the learning rate of the configuration, and say that it is from there."""
    found = []
    for run in runs:
        config = run.manifest.get("config")
        for section in _SECTIONS:
            entry = config.get(section) if isinstance(config, dict) else None
            value = entry.get("lr") if isinstance(entry, dict) else None
            if isinstance(value, int | float) and math.isfinite(value):
                found.append(float(value))
    if found:
        text = "no learning rate was recorded: bounds after the first update use the configured"
        return max(found), f"{text} {max(found):g}"
    text = "no learning rate is known: bounds after the first update assume"
    return ASSUMED_RATE, f"{text} {ASSUMED_RATE:g}"
