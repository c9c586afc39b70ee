"""How near healthy runs come to the bounds of a policy: what those of ``cross_framework`` were chosen by.

    python -m mindspeed_precision.testing.calibrate BASELINE CANDIDATE [BASELINE CANDIDATE ...]

Takes pairs of recorded runs that are known to be healthy (elements kept: ``capture.level=tensor``) and says,
for each phase, role and metric, the worst value before the first update, the worst growth per unit of the
optimizer's reach after it, and the share of the bound that was used. Exit status 1 where a bound is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.align import Mapping, align, load_mapping
from mindspeed_precision.compare import CROSS_POLICY, Policy, compare_pair, load_policy, make_context
from mindspeed_precision.compare.verdict import limits_for
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.records import Phase, Verdict


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One metric of one pair of records whose bits differ.

    Attributes:
        kind: phase, role and metric.
        value: the metric.
        limit: its bound there.
        start: its bound before the first update.
        reach: sum of the learning rates before it.
        place: run and record, for a person.
    """

    kind: tuple[str, str, str]
    value: float
    limit: float
    start: float
    reach: float
    place: str

    @property
    def used(self) -> float:
        """Share of the bound."""
        return self.value / self.limit if self.limit else float(self.value > 0)


def samples(
    baseline: str | Path, candidate: str | Path, *, policy: Policy, mappings: Sequence[Mapping] = ()
) -> Iterator[Sample]:
    """Yield every bounded metric of two healthy runs.

    Raises:
        DumpError: a run cannot be read.
        IncomparableError: the runs do not answer the same question.
    """
    aligned = align(load_run(baseline), load_run(candidate), mappings)
    one, two = aligned.baseline, aligned.candidate
    context = make_context(one, two, aligned.pairs, policy)
    for pair in aligned.pairs:
        found = compare_pair(pair, policy=policy, baseline=one, candidate=two, context=context)
        model = context.model if context is not None else ""
        rule = policy.rule_for(pair.key, pair.candidate.dtype, model)
        if rule is None or found.verdict not in (Verdict.WITHIN_TOLERANCE, Verdict.DIVERGED):
            continue
        reach = context.reach.before(pair.key.step) if context is not None else 0.0
        for limit, start in zip(
            limits_for(rule, found.metrics, pair, context),
            limits_for(rule, found.metrics, pair, None),
            strict=True,
        ):
            if limit.metric in found.metrics:
                yield Sample(
                    kind=(pair.key.phase.value, pair.key.role.value, limit.metric),
                    value=float(found.metrics[limit.metric]),
                    limit=limit.maximum,
                    start=start.maximum,
                    reach=reach,
                    place=f"{Path(candidate).parent.name}: {pair.key.describe()}",
                )


def table(found: Iterable[Sample]) -> list[str]:
    """Return a line per kind: count, worst before an update, worst growth, share of the bound used, where."""
    kinds: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in found:
        kinds.setdefault(sample.kind, []).append(sample)
    order = [phase.value for phase in Phase]
    rows = [("phase", "role", "metric", "n", "at start", "growth / R", "of bound", "worst")]
    for kind in sorted(kinds, key=lambda kind: (order.index(kind[0]), *kind[1:])):
        members = kinds[kind]
        first = max((s.value for s in members if not s.reach), default=0.0)
        growth = max((max(s.value - first, 0.0) / s.reach for s in members if s.reach), default=0.0)
        worst = max(members, key=lambda sample: sample.used)
        numbers = (str(len(members)), f"{first:.1e}", f"{growth:.1e}", f"{worst.used:.3f}")
        rows.append((*kind, *numbers, worst.place))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pairs of runs; 1 where a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_precision.testing.calibrate")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="baseline and candidate, in turn")
    parser.add_argument("--policy", default=CROSS_POLICY, help="whose bounds (%(default)s)")
    parser.add_argument("--mapping", action="append", default=[], metavar="FILE")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) % 2:
        parser.error("runs come in pairs: a baseline and a candidate")
    policy = load_policy(arguments.policy)
    mappings = [load_mapping(file) for file in arguments.mapping]
    found = [
        sample
        for one, two in zip(arguments.runs[::2], arguments.runs[1::2], strict=True)
        for sample in samples(one, two, policy=policy, mappings=mappings)
    ]
    sys.stdout.write("\n".join(table(found)) + "\n")
    return int(any(sample.used > 1 for sample in found))


if __name__ == "__main__":
    sys.exit(main())
