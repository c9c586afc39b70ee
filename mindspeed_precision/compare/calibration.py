"""Bounds from a run of this very model: what one rounding of noise in its parameters does to each record.

The baseline is run again with relative noise of one rounding on every parameter (setting ``perturb``). By how
much its records then move is how far this model lets legitimate rounding grow, by depth and by step. A record
of the candidate may be off by ``FACTOR`` times that (``docs/tolerance.md``, with figures).

One small distance may be luck. So the reference of a record is the largest distance among its neighbours: the
same kind of record (phase, role, slot, name without numbers), in the microbatches of all steps that are no
further from a state that both runs had, in its own layer and those ``NEIGHBOURS`` beside it; and not below
the median of its phase, role and step.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from mindspeed_precision.compare.policy import Limit
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.records import Comparison, Pair, Phase, RecordKey, Role, Verdict

FACTOR = 4.0
"""Largest error that is allowed, in units of the reference; the worst of healthy pairs is 2.2."""

AFTER_UPDATES = 16.0
"""How much more is allowed once an optimizer has updated what both runs began with, but no more than the
policy allows; the worst of healthy pairs is 6.7, on two processors.

An element whose gradient is nearly nothing is moved by as much as any other, in a direction that rounding
decides: how many there are, and where, is luck that one perturbed run does not show."""

LEAST_OF_UPDATE = 1 / 8
"""How far calibration tightens bounds in units of an update: it is a share of the unluckiest element."""

FACTOR_OF_CHANGES = 10.0
"""The same for the change of a norm or an extreme: one number, which comes near zero by luck; worst 3.4."""

FLOOR = 4.0
"""Smallest bound, in unit roundoffs of the record's dtype."""

NEIGHBOURS = 1
"""Layers on either side whose distances count for a record."""

FEWEST = 16
"""Elements below which a tensor may agree by luck: it keeps the policy's bound."""

SATURATED = 0.5
"""A bound on a relative error beyond which nothing is left to judge."""

CALIBRATED = "calibrated"
"""What a limit says of where it comes from."""

_UPPER_ENDS = {"rel_frobenius": "sketch_high", "update_share": "sketch_update_share"}
"""What stands for a distance where sketches alone were kept."""

_RELATIVE = frozenset(
    {"rel_frobenius", "max_ratio", "worst_rows_ratio", "norm_change", "extreme_change", "sketch_low"}
)
_CHANGES = frozenset({"norm_change", "extreme_change", "norm_update_share"})
_UPDATES = frozenset({"update_share", "norm_update_share", "sketch_update_least"})
"""Bounds in units of what the optimizer can do: calibration only tightens them.

The noise is on the parameters themselves, so that their distance is more than what an update adds."""

_OF_NOISE = "noise_update_ratio"
"""Largest update of an element whose gradient is noise: a matter of luck, up to what the optimizer can do."""

_POWERS_OF_CLIP_FACTOR = {
    (Phase.CLIP, Role.MAIN_GRAD): 1,
    (Phase.OPTIMIZER, Role.EXP_AVG): 1,
    (Phase.OPTIMIZER, Role.EXP_AVG_SQ): 2,
}
"""What the clip factor multiplies, and how often."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class _Kind:
    """Records that behave alike: all that differs is layer, step, microbatch and rank."""

    phase: Phase
    role: Role
    slot: str
    name: str
    metric: str


def _kind(key: RecordKey, metric: str) -> _Kind:
    # the range of a distributed optimizer is no slot
    slot = "" if key.role is Role.REDUCED_GRAD else key.slot
    return _Kind(key.phase, key.role, slot, _NUMBER.sub("*", key.fqn), metric)


def _with_the_run(step: int) -> int:
    """Say that no step but the first began with one state."""
    return min(step, 0)


def layer_of(fqn: str) -> int:
    """Return the first number in a canonical name, which is the layer's; -1 where it has none."""
    found = _NUMBER.search(fqn)
    return int(found.group()) if found else -1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How far rounding moves the records of a model.

    Attributes:
        runs: the perturbed runs, as a person names them.
        samples: largest distance by kind, then step and layer.
        medians: median distance by phase, role, metric and step.
        start_of: the last step, up to a given one, that baseline and candidate began with one state.
        unlike: steps that a perturbed run has and began otherwise than the candidate.
    """

    runs: tuple[str, ...]
    samples: dict[_Kind, dict[tuple[int, int], float]] = field(default_factory=dict)
    medians: dict[tuple[Phase, Role, str, int], float] = field(default_factory=dict)
    start_of: Callable[[int], int] = _with_the_run
    unlike: frozenset[int] = frozenset()

    def reference(self, pair: Pair, metric: str) -> float | None:
        """Return the distance that rounding alone gives a record; None where nothing shows it."""
        key = pair.key
        if self.uncovered(pair) or (key.phase, key.role, metric, key.step) not in self.medians:
            return None
        age = self.age_of(key.step)
        layer, of_kind = layer_of(key.fqn), self.samples.get(_kind(key, metric), {})
        near = [
            value
            for (step, other), value in of_kind.items()
            if self.age_of(step) <= age and abs(other - layer) <= NEIGHBOURS and (other < 0) == (layer < 0)
        ]
        if not near or not any(step == key.step for step, _ in of_kind):
            return None
        return max(*near, self.medians[key.phase, key.role, metric, key.step])

    def allowed(self, key: RecordKey, limit: Limit, reference: float) -> float:
        """Return how large a metric of a record may be: so many times its reference.

        Args:
            key: of the record.
            limit: the policy's bound on the metric, as it is for the record.
            reference: what rounding alone gives it.
        """
        once = (FACTOR_OF_CHANGES if limit.metric in _CHANGES else FACTOR) * reference
        updated = self.age_of(key.step) > 0
        return max(once, min(AFTER_UPDATES * once, limit.maximum)) if updated else once

    def age_of(self, step: int) -> int:
        """Return how many steps ago both runs had one state: what rounding has grown over."""
        return step - self.start_of(step)

    def uncovered(self, pair: Pair) -> str:
        """Say why a record keeps the policy's bound; empty where it does not for any of these reasons."""
        key = pair.key
        if key.phase is Phase.INIT or pair.candidate.dtype not in UNIT_ROUNDOFF:
            return "exact"
        if pair.candidate.numel < FEWEST:
            return f"have fewer than {FEWEST} elements, which may agree by luck"
        if not any(step == key.step for *_, step in self.medians):
            if key.step in self.unlike:
                return "are of a step that no perturbed run began as the candidate did"
            return "are of a step that no perturbed run has"
        return ""

    def apply(self, pair: Pair, limit: Limit) -> Limit:
        """Return a bound of the policy with the calibrated one in its place, where there is one."""
        reference = None if limit.metric == _OF_NOISE else self.reference(pair, limit.metric)
        if reference is None:
            return limit
        floor = FLOOR * UNIT_ROUNDOFF[pair.candidate.dtype] if limit.metric in _RELATIVE else 0.0
        clipped = FACTOR * self._of_clip_factor(pair.key) if limit.metric in _RELATIVE else 0.0
        maximum = max(self.allowed(pair.key, limit, reference) + clipped, floor)
        if limit.metric in _UPDATES:
            maximum = max(maximum, LEAST_OF_UPDATE * limit.maximum)
            if not reference or maximum >= limit.maximum:
                return limit
        return replace(limit, maximum=maximum, growth=0.0, source=CALIBRATED)

    def _of_clip_factor(self, key: RecordKey) -> float:
        """Return how far the clip factor is off: no more than the gradients whose norm it is made of."""
        powers = _POWERS_OF_CLIP_FACTOR.get((key.phase, key.role), 0)
        return powers * self.medians.get((Phase.REDUCE, Role.REDUCED_GRAD, "rel_frobenius", key.step), 0.0)

    def notes(self, comparisons: Iterable[Comparison]) -> list[str]:
        """Say what the bounds of some comparisons came from, and of which nothing can be told."""
        said = ", ".join(self.runs)
        judged = [c for c in comparisons if c.verdict in (Verdict.WITHIN_TOLERANCE, Verdict.DIVERGED)]
        pairs = [c for c in judged if isinstance(c.pair, Pair)]
        by = Counter(self._state(c.pair) for c in pairs if isinstance(c.pair, Pair))
        exact = by.pop("exact", 0)
        calibrated = by.pop("", 0)
        notes = [
            f"bounds of {calibrated} records that differ are calibrated: {FACTOR:g} times what one rounding "
            f"of noise does, behind an update up to {FACTOR * AFTER_UPDATES:g} times ({said})"
        ]
        notes += [f"{count} records {reason}: bounds of the policy" for reason, count in by.most_common()]
        if exact:
            notes.append(f"{exact} records that differ are copies or of no floating type: no calibration")
        blind = sorted({c.key.fqn for c in pairs if self._blind(c.pair)})
        if blind:
            names = ", ".join(blind[:4]) + (f" and {len(blind) - 4} more" if len(blind) > 4 else "")
            notes.append(
                f"rounding alone changes these by half their size, so that nothing shows in them: {names}"
            )
        return notes

    def _state(self, pair: Pair) -> str:
        reason = self.uncovered(pair)
        known = any(self.reference(pair, metric) is not None for metric in _RELATIVE | _UPDATES)
        return reason or ("" if known else "have no partner in a perturbed run")

    def _blind(self, pair: Pair | object) -> bool:
        if not isinstance(pair, Pair):
            return False
        found = self.reference(pair, "rel_frobenius")
        return found is not None and FACTOR * found >= SATURATED


def calibrate(
    runs: Sequence[str],
    compared: Iterable[Comparison],
    limits: Sequence[Limit],
    *,
    start_of: Callable[[int], int] = _with_the_run,
    unlike: Iterable[int] = (),
) -> Calibration:
    """Read how far rounding moved each record.

    Args:
        runs: the perturbed runs, as a person names them.
        compared: every comparison of the baseline with a perturbed run, under the policy.
        limits: every bound of that policy: what is measured.
        start_of: the last step, up to a given one, that baseline and candidate began with one state.
        unlike: steps of the perturbed runs that say nothing, since they began otherwise.
    """
    metrics = {limit.metric for limit in limits}
    samples: dict[_Kind, dict[tuple[int, int], float]] = defaultdict(dict)
    every: dict[tuple[Phase, Role, str, int], list[float]] = defaultdict(list)
    for comparison in compared:
        key, pair = comparison.key, comparison.pair
        if not isinstance(pair, Pair) or pair.candidate.numel < FEWEST or key.phase is Phase.INIT:
            continue
        for metric in metrics:
            value = _distance(comparison, metric)
            if value is None:
                continue
            of_kind, place = samples[_kind(key, metric)], (key.step, layer_of(key.fqn))
            of_kind[place] = max(of_kind.get(place, 0.0), value)
            every[key.phase, key.role, metric, key.step].append(value)
    medians = {place: median(values) for place, values in every.items()}
    return Calibration(
        runs=tuple(runs),
        samples=dict(samples),
        medians=medians,
        start_of=start_of,
        unlike=frozenset(unlike),
    )


def _distance(comparison: Comparison, metric: str) -> float | None:
    """Return the distance by one metric; equal bits are at none."""
    if comparison.verdict is Verdict.IDENTICAL:
        return 0.0
    found = comparison.metrics.get(metric, comparison.metrics.get(_UPPER_ENDS.get(metric, "")))
    noise = comparison.metrics.get("noise_elements")
    pair = comparison.pair
    if found is None or (isinstance(pair, Pair) and noise == pair.candidate.numel):
        return None
    return float(found)
