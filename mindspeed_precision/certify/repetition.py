"""How far two runs that should be one are it: through which step, over how many records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from mindspeed_precision.dump.reader import Run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import INIT_STEP, Comparison, Diagnosis, Finding, Origin, Verdict


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """A run, and one that should have the same bits in the steps that both have.

    Attributes:
        name: what the second run is: ``second``, ``first part``, ``resumed part``.
        one: the run to repeat.
        other: the run that should repeat it.
        diagnosis: what comparing them bit for bit gave.
    """

    name: str
    one: Run
    other: Run
    diagnosis: Diagnosis

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that both have, ascending."""
        return self.diagnosis.steps

    @cached_property
    def different(self) -> tuple[Comparison, ...]:
        """Every pair of records that is not bit-equal, or cannot be compared, in execution order."""
        return tuple(one for one in self.diagnosis.comparisons if one.verdict is not Verdict.IDENTICAL)

    @property
    def equal(self) -> int:
        """Number of records whose bits are equal."""
        return len(self.diagnosis.comparisons) - len(self.different)

    @property
    def whole(self) -> bool:
        """Whether every record of either run has the same bits in the other."""
        return self.equal == self.total > 0

    @property
    def alone(self) -> int:
        """Records of the compared steps that one run alone has; a pair that is missing is among them."""
        missing = sum(one.verdict is Verdict.MISSING for one in self.different)
        return max(len(self.diagnosis.unmatched), missing)

    @property
    def total(self) -> int:
        """Number of records: pairs, and those of one run alone."""
        missing = sum(one.verdict is Verdict.MISSING for one in self.different)
        return len(self.diagnosis.comparisons) - missing + self.alone

    @cached_property
    def through(self) -> int | None:
        """Last step through which nothing differs, and no record is of one run alone; None: not even one."""
        bad = [one.key.step for one in self.different] + [one.key.step for one in self.diagnosis.unmatched]
        good = [step for step in self.steps if not bad or step < min(bad)]
        return good[-1] if good else None

    @property
    def vacuous(self) -> tuple[Finding, ...]:
        """Why nothing may be certified although nothing differs."""
        return tuple(finding for finding in self.diagnosis.findings if finding.id.startswith("vacuous."))

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where differences start, the first one first."""
        return self.diagnosis.origins

    @property
    def began(self) -> int:
        """The step with which the second run began."""
        return _recorded(self.other)[0]

    @property
    def other_end(self) -> int:
        """The step behind the last one of the second run."""
        return _recorded(self.other)[-1] + 1


def _recorded(run: Run) -> list[int]:
    """Return the steps of a run, ascending; as if it began at step 0 where it has none."""
    steps = {step for records in run.ranks.values() for step in records.steps}
    return sorted(steps - {INIT_STEP}) or [0]


def repetition(name: str, one: Run, other: Run) -> Repetition:
    """Compare a run with one that should repeat it, bit for bit.

    Raises:
        IncomparableError: the runs do not answer the same question.
        DumpError: what an index promises cannot be read.
    """
    diagnosis = compare_runs(one, other, policy="exact", replay=False)
    return Repetition(name=name, one=one, other=other, diagnosis=diagnosis)


def share(repetitions: Iterable[Repetition]) -> Mapping[str, float | int]:
    """Count the records of all repetitions: all, equal, of one run alone, and the equal part in percent."""
    several = list(repetitions)
    total, equal = sum(one.total for one in several), sum(one.equal for one in several)
    return {
        "records": total,
        "equal": equal,
        "of_one_run_alone": sum(one.alone for one in several),
        "percent": 100.0 * equal / total if total else 0.0,
    }
