"""Whether the optimizer moved what it had to: parameters before and after every step of one run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.fingerprint import is_zero
from mindspeed_precision.records import Phase, RecordKey, Role, TensorRecord

GRADIENTS = (
    (Phase.CLIP, Role.MAIN_GRAD),
    (Phase.REDUCE, Role.REDUCED_GRAD),
    (Phase.ACCUMULATE, Role.MAIN_GRAD),
    (Phase.WGRAD, Role.WGRAD),
    (Phase.WGRAD, Role.BGRAD),
)
"""Where the gradient of a step is looked for: the closest to the optimizer first."""

_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Unit roundoff: an update smaller than this share of an element may leave it as it is."""

_ADAM_SHARE = 0.01
"""Share of lr by which Adam moves the element with the largest gradient, at the least."""


@dataclass(frozen=True, kw_only=True)
class Unmoved:
    """A parameter that has the same bits after a step of the optimizer as before it.

    Attributes:
        rank: where.
        key: of the parameter's record after the step (of the master parameter where there is one).
        lr: learning rate that the optimizer used for it; greater than 0.
        gradient: norm of its gradient; None: no statistics were kept.
        rounded: rounding may have swallowed the update: it is small against the parameter's elements, or
            that cannot be told of a type of 16 bits.
        ranks: how many ranks it is of.
    """

    rank: int
    key: RecordKey
    lr: float
    gradient: float | None
    rounded: bool
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Movement:
    """What the optimizer did to the trainable parameters in some steps of one run.

    Attributes:
        moved: number of updates that changed a parameter.
        unmoved: updates at lr > 0, with a gradient that is not zero, that changed nothing. Of a parameter
            that held NaN nothing is counted.
    """

    moved: int
    unmoved: tuple[Unmoved, ...]

    @cached_property
    def failed(self) -> tuple[Unmoved, ...]:
        """The updates that no rounding explains."""
        return tuple(one for one in self.unmoved if not one.rounded)


def movement_of(
    run: Run,
    ranks: Iterable[int],
    steps: Sequence[int],
    loaded: Mapping[int, Run | None] | None = None,
    *,
    weight: Callable[[int, str], int] = lambda _, __: 1,
) -> Movement:
    """Compare every parameter that the optimizer updated with what it was before.

    Args:
        run: the run.
        ranks: which of its ranks.
        steps: which of its steps.
        loaded: the steps before which it loaded another run's state, each with that run; None: that is not
            here, so that nothing is said of the step.
        weight: for how many ranks one stands with a parameter.

    Only updates that the run recorded count: of a skipped step there is no learning rate, and a rank that
    holds no part of a parameter's optimizer state updates it later, by a gather.
    """
    moved, unmoved = 0, []
    for number in ranks:
        known = {step: None if one is None else one.ranks[number] for step, one in (loaded or {}).items()}
        for update in _updates(run.ranks[number], frozenset(steps), known):
            if update.of_nan:  # stays NaN whatever the optimizer does: `nonfinite.first` is about that
                continue
            if update.before.digest.fingerprint != update.after.digest.fingerprint:
                moved += weight(number, update.after.key.fqn)
            elif update.lr > 0 and not update.zero_gradient:
                unmoved.append(
                    Unmoved(
                        rank=number,
                        key=update.after.key,
                        lr=update.lr,
                        gradient=update.gradient_norm,
                        rounded=update.may_be_rounded,
                        ranks=weight(number, update.after.key.fqn),
                    )
                )
    return Movement(moved=moved, unmoved=tuple(unmoved))


@dataclass(frozen=True, kw_only=True)
class _Update:
    """One parameter in one step: what it was, what it is, and what the optimizer was given."""

    before: TensorRecord
    after: TensorRecord
    gradients: tuple[TensorRecord, ...]
    numbers: dict[str, float]

    @property
    def lr(self) -> float:
        return self.numbers["lr"]

    @property
    def of_nan(self) -> bool:
        """Whether the parameter held NaN before the step."""
        statistics = self.before.digest.statistics
        return statistics is not None and statistics.nans > 0

    @property
    def zero_gradient(self) -> bool:
        """Whether all that was recorded of the gradient is zero; True where nothing was recorded."""
        return all(_is_zero(record) for record in self.gradients)

    @property
    def gradient_norm(self) -> float | None:
        norms = [r.digest.statistics.l2_norm for r in self.gradients if r.digest.statistics is not None]
        return float(sum(norm**2 for norm in norms) ** 0.5) if norms else None

    @property
    def may_be_rounded(self) -> bool:
        """Whether the largest update that can be expected is lost in the largest element's rounding.

        Adam moves an element by about lr, whatever its gradient is (Kingma and Ba 2015, section 2.1);
        anything else is taken to move it by lr × gradient.
        """
        roundoff = _ROUNDOFF.get(self.after.dtype, 0.0)
        statistics = self.after.digest.statistics
        found = [r.digest.statistics for r in self.gradients if r.digest.statistics is not None]
        if statistics is None or not found:
            return roundoff > _ROUNDOFF["float32"]
        gradient = max(max(abs(s.minimum), abs(s.maximum)) for s in found)
        share = _ADAM_SHARE * gradient / (gradient + self.numbers.get("eps", 0.0))
        update = self.lr * (share if "beta1" in self.numbers else gradient)
        largest = max(abs(statistics.minimum), abs(statistics.maximum))
        return update < 2 * roundoff * largest


def _is_zero(record: TensorRecord) -> bool:
    """Tell whether a tensor is zero; without statistics by its fingerprints, which know +0.0 alone."""
    if record.digest.statistics is not None:
        return record.digest.statistics.zeros == record.numel
    return is_zero(record.digest.fingerprint, record.digest.unordered, record.numel)


_Kept = Mapping[tuple[str, Role, str], Mapping[int, TensorRecord]]


def _states(rank: RankRecords, trained: frozenset[str]) -> _Kept:
    """Return parameters and their copies by name, role, slot and step."""
    states: dict[tuple[str, Role, str], dict[int, TensorRecord]] = defaultdict(dict)
    for record in rank.records:
        key = record.key
        if key.fqn in trained and key.role in (Role.PARAM, Role.MASTER_PARAM):
            states[key.fqn, key.role, key.slot][key.step] = record
    return states


def _updates(
    rank: RankRecords, steps: frozenset[int], loaded: Mapping[int, RankRecords | None]
) -> Iterator[_Update]:
    """Yield every update of a trainable parameter that this rank's optimizer made in ``steps``."""
    trained = frozenset(p.fqn for p in rank.parameters if p.trainable and not p.tied_to)
    states = _states(rank, trained)
    sources = {id(one): _states(one, trained) for one in loaded.values() if one is not None}
    gradients: dict[tuple[int, str], list[TensorRecord]] = defaultdict(list)
    numbers: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for record in rank.records:
        key = record.key
        if key.fqn not in trained:
            continue
        if key.role is Role.HYPERPARAMETER and record.value is not None:
            numbers[key.step, key.fqn][key.slot] = record.value
        elif (key.phase, key.role) in GRADIENTS and key.slot != "before":
            gradients[key.step, key.fqn].append(record)
    # the master parameter is what the optimizer updates; its copy may round the change away
    masters = {
        (step, fqn)
        for (fqn, role, _), by_step in states.items()
        if role is Role.MASTER_PARAM
        for step in by_step
        if step - 1 in by_step
    }
    for (fqn, role, slot), by_step in states.items():
        for step in sorted(steps & by_step.keys()):
            given = numbers.get((step, fqn), {})
            superseded = role is Role.PARAM and (step, fqn) in masters
            if step in loaded:
                began = sources.get(id(loaded[step]), {}).get((fqn, role, slot), {})
            else:
                began = by_step
            if step - 1 in began and "lr" in given and not superseded:
                yield _Update(
                    before=began[step - 1],
                    after=by_step[step],
                    gradients=_closest(gradients.get((step, fqn), ())),
                    numbers=given,
                )


def _closest(found: Iterable[TensorRecord]) -> tuple[TensorRecord, ...]:
    """Return the gradients closest to the optimizer."""
    by_kind: dict[tuple[Phase, Role], list[TensorRecord]] = defaultdict(list)
    for record in found:
        by_kind[record.key.phase, record.key.role].append(record)
    return tuple(next((by_kind[kind] for kind in GRADIENTS if kind in by_kind), ()))
