"""What the optimizer of one rank did to each tensor, step by step, with what it found there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mindspeed_precision.align.forced import loaded_states
from mindspeed_precision.records import INIT_STEP, Phase, Role, TensorRecord
from mindspeed_precision.verify.run_facts import RunFacts

_STATES = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.MASTER_PARAM, Role.PARAM)


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update of one parameter, or of a rank's range of it.

    Attributes:
        rank: whose optimizer made it.
        fqn: the parameter.
        step: of the training.
        gradient: what was applied, after clipping.
        numbers: hyperparameters as applied; ``step`` is the count of updates before this one.
        counter: the record of ``step``; None: the optimizer does not count (gradient descent).
        after: exp_avg, exp_avg_sq, master parameter and parameter after it, by role.
        before: the same before it, where it was recorded and nothing unrecorded came between.
        fresh: the first update of the whole training: moments are zero before it.
        first: the first update of this tensor that was recorded.
    """

    rank: int
    fqn: str
    step: int
    gradient: TensorRecord
    numbers: Mapping[str, float]
    counter: TensorRecord | None
    after: Mapping[Role, TensorRecord]
    before: Mapping[Role, TensorRecord]
    fresh: bool
    first: bool

    @property
    def updated(self) -> TensorRecord | None:
        """What the optimizer wrote: the master parameter where there is one, else the parameter."""
        return self.after.get(Role.MASTER_PARAM, self.after.get(Role.PARAM))

    @property
    def original(self) -> TensorRecord | None:
        """What it was before; a master parameter was the parameter itself when the training began."""
        found = self.before.get(Role.MASTER_PARAM)
        if found is None and (self.first or Role.MASTER_PARAM not in self.after):
            found = self.before.get(Role.PARAM)
        return found


@dataclass
class _Step:
    gradient: TensorRecord | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    counter: TensorRecord | None = None
    states: dict[Role, TensorRecord] = field(default_factory=dict)


def updates(facts: RunFacts, rank: int) -> tuple[Update, ...]:
    """Return the updates that a rank recorded, by parameter, in the order of the steps.

    Raises:
        DumpError: the manifest is damaged.
    """
    return facts.once(("updates", rank), lambda: tuple(_updates(facts, rank)))


def _updates(facts: RunFacts, rank: int) -> Iterator[Update]:
    ranked = facts.ranks[rank]
    known = {p.fqn for p in ranked.parameters if p.trainable}
    by_name: dict[str, dict[int, _Step]] = defaultdict(lambda: defaultdict(_Step))
    for record in ranked.records:
        key = record.key
        if key.fqn in known and key.phase in (Phase.INIT, Phase.CLIP, Phase.OPTIMIZER):
            _sort_in(by_name[key.fqn][key.step], record)
    began = facts.run.manifest.get("first_step")
    for fqn, by_step in by_name.items():
        yield from _of_parameter(facts, rank, fqn, by_step, began if isinstance(began, int) else None)


def _sort_in(step: _Step, record: TensorRecord) -> None:
    key = record.key
    if key.phase is Phase.CLIP and key.role is Role.MAIN_GRAD:
        step.gradient = record
    elif key.role is Role.HYPERPARAMETER and record.value is not None:
        step.numbers[key.slot] = record.value
        step.counter = record if key.slot == "step" else step.counter
    elif key.role in _STATES:
        step.states[key.role] = record


def _counts(numbers: Mapping[str, float]) -> bool:
    """Tell whether ``step`` is a count: an optimizer that keeps none is recorded with 0."""
    return "beta1" in numbers or bool(numbers.get("step"))


def _of_parameter(
    facts: RunFacts, rank: int, fqn: str, by_step: Mapping[int, _Step], began: int | None
) -> Iterator[Update]:
    steps = facts.ranks[rank].steps
    forced = loaded_states(facts.run).keys()
    state: dict[Role, TensorRecord] = dict(by_step[INIT_STEP].states) if INIT_STEP in by_step else {}
    first, expected = True, began
    for step in sorted(set(steps) - {INIT_STEP}):
        if (expected is not None and step != expected) or step in forced:
            state = {}  # what came between was not recorded, or another run's state was loaded
        expected = step + 1
        found = by_step.get(step)
        if found is None:  # rules left this step out
            state, first = {}, False
            continue
        seen = found.gradient is not None and "lr" in found.numbers
        if seen and found.gradient is not None:
            yield Update(
                rank=rank,
                fqn=fqn,
                step=step,
                gradient=found.gradient,
                numbers=found.numbers,
                counter=found.counter if _counts(found.numbers) else None,
                after=found.states,
                before=dict(state),
                fresh=first and found.numbers.get("step") == 0 and step not in forced,
                first=first and began in (None, 0),
            )
            first = False
            state = dict(found.states)
        elif found.gradient is not None or found.numbers or Role.EXP_AVG in found.states:
            state, first = {}, False  # an update of which a part was not recorded
        else:
            state.update(found.states)  # a step that was skipped
