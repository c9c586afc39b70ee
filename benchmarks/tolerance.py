"""Measures what docs/tolerance.md says: healthy pairs against the bounds and perturbed runs.

    python benchmarks/tolerance.py ratios RUNS          how far healthy pairs are, in units of the reference
    python benchmarks/tolerance.py figures RUNS FOLDER  error growth by depth and by step, as SVG files

RUNS keeps the trained runs: a second call trains nothing. Up to an hour on two cores. ``ratios`` exits with
status 1 where a healthy pair diverges from its baseline, with calibration or without.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tolerance_runs import LAYOUTS, Group, groups, train

from mindspeed_precision.align import align
from mindspeed_precision.compare import Calibration, calibrate, compare_pair, load_policy, make_context
from mindspeed_precision.compare.calibration import FACTOR, FLOOR
from mindspeed_precision.compare.policy import Limit
from mindspeed_precision.compare.verdict import limits_for
from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.records import RecordKey, Verdict

POLICY = load_policy("cross_layout")
METRIC = "rel_frobenius"
Wanted = Callable[[RecordKey], bool]
CHANGES = ("norm_change", "extreme_change")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One metric of one record of a healthy pair.

    Attributes:
        key: of the record.
        depth: layers that it passed.
        metric: its name.
        value: of the pair.
        reference: of the perturbed run.
        allowed: the calibrated bound.
        floor: below which a reference does not count.
        bound: of the policy; 0 for a metric that it does not use there.
    """

    key: RecordKey
    depth: int
    metric: str
    value: float
    reference: float
    allowed: float
    floor: float
    bound: float

    @property
    def ratio(self) -> float:
        """The value in units of the reference."""
        return self.value / max(self.reference, self.floor) if self.value else 0.0


def references(baseline: Run, perturbed: list[Run], wanted: Wanted) -> Calibration:
    """Measure the perturbed runs as ``compare --calibrate`` does, at some records alone."""
    compared = []
    for run in perturbed:
        aligned = align(baseline, run)
        one, two = aligned.baseline, aligned.candidate
        context = make_context(one, two, aligned.pairs, POLICY)
        chosen = [pair for pair in aligned.pairs if wanted(pair.key)]
        compared += [
            compare_pair(pair, policy=POLICY, baseline=one, candidate=two, context=context) for pair in chosen
        ]
    return calibrate([str(run.path) for run in perturbed], compared, POLICY.limits)


def samples(baseline: Run, candidate: Run, perturbed: list[Run], wanted: Wanted) -> Iterator[Sample]:
    """Yield every metric of a healthy pair that calibration has a reference for."""
    calibration = references(baseline, perturbed, wanted)
    aligned = align(baseline, candidate)
    one, two = aligned.baseline, aligned.candidate
    context = make_context(one, two, aligned.pairs, POLICY)
    assert context is not None
    for pair in (pair for pair in aligned.pairs if wanted(pair.key)):
        found = compare_pair(pair, policy=POLICY, baseline=one, candidate=two, context=context)
        rule = POLICY.rule_for(pair.key, pair.candidate.dtype, context.model)
        noise = found.metrics.get("noise_elements") == pair.candidate.numel
        if rule is None or found.verdict not in (Verdict.WITHIN_TOLERANCE, Verdict.DIVERGED) or noise:
            continue
        limits = {limit.metric: limit for limit in limits_for(rule, found.metrics, pair, context)}
        for metric, value in found.metrics.items():
            reference = calibration.reference(pair, metric)
            if reference is None:
                continue
            limit = limits.get(metric, Limit(metric=metric, maximum=0.0))
            floor = _floor(pair.candidate.dtype, metric)
            yield Sample(
                key=pair.key,
                depth=context.depth.passed(pair.key),
                metric=metric,
                value=float(value),
                reference=reference,
                allowed=max(calibration.allowed(pair.key, limit, reference), floor),
                floor=floor / FACTOR,
                bound=limit.maximum,
            )


def _floor(dtype: str, metric: str) -> float:
    share = metric in ("update_share", "norm_update_share")
    return 1e-300 if share else FLOOR * UNIT_ROUNDOFF[dtype]


def noisy_runs(home: Path, baseline: str) -> list[Run]:
    """Load the perturbed runs of a baseline."""
    return [load_run(path) for path in sorted(home.glob(f"{baseline}-noise*")) if path.is_dir()]


def every(key: RecordKey) -> bool:
    """Want a record."""
    return True


def measured(folder: Path, group: Group, wanted: Wanted = every) -> dict[str, list[Sample]]:
    """Train the runs of a group where they are not there, and measure its healthy pairs by layout."""
    home = train(folder, group)
    found = {}
    for name in group.layouts:
        baseline = LAYOUTS[name].baseline
        runs = load_run(home / baseline), load_run(home / name)
        found[name] = list(samples(*runs, noisy_runs(home, baseline), wanted))
    return found


def alarms(home: Path, layout: str) -> Iterator[tuple[str, int]]:
    """Yield what calibrates a healthy pair, one perturbed run at a time, and how many records diverge."""
    baseline = LAYOUTS[layout].baseline
    for noisy in (None, *noisy_runs(home, baseline)):
        chosen = [] if noisy is None else [noisy.path]
        found = compare_runs(home / baseline, home / layout, policy=POLICY.name, calibrate=chosen)
        diverged = sum(one.verdict is Verdict.DIVERGED for one in found.comparisons)
        yield ("no calibration" if noisy is None else noisy.path.name), diverged


def ratios(folder: Path) -> int:
    """Print the worst ratio of each kind of record over all models; 1 where a healthy pair diverges."""
    worst: dict[tuple[str, str, str, str], list[tuple[float, str]]] = defaultdict(list)
    pairs = bad = 0
    for group in groups("ratios"):
        for layout, found in measured(folder, group).items():
            for one in found:
                if one.metric in (METRIC, "max_ratio", "worst_rows_ratio", *CHANGES):
                    when = "first step" if one.key.step == 0 else "later"
                    kind = when, one.key.phase.value, one.key.role.value, one.metric
                    worst[kind].append((one.ratio, f"{group.name}/{layout}: {one.key.describe()}"))
            for how, diverged in alarms(folder / group.name, layout):
                pairs, bad = pairs + 1, bad + (diverged > 0)
                if diverged:
                    sys.stdout.write(f"FALSE ALARM {group.name}/{layout}, {how}: {diverged} records\n")
    for kind in sorted(worst):
        ordered = sorted(worst[kind])
        middle, (top, where) = ordered[len(ordered) // 2][0], ordered[-1]
        line = f"{kind[0]:10} {kind[1]:10} {kind[2]:12} {kind[3]:16} n={len(ordered):6}"
        sys.stdout.write(f"{line} median {middle:.2f} worst {top:.2f}  {where}\n")
    sys.stdout.write(f"{pairs} healthy comparisons, {bad} with a divergence\n")
    return int(bad > 0)


def main(argv: list[str]) -> int:
    """Run one of the two measurements."""
    if argv[:1] == ["ratios"] and len(argv) == 2:
        return ratios(Path(argv[1]))
    if argv[:1] == ["figures"] and len(argv) == 3:
        from tolerance_figures import draw

        return draw(Path(argv[1]), Path(argv[2]))
    sys.stderr.write(__doc__ or "")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
