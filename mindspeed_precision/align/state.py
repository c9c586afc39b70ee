"""The state that a recorded run had before each of its steps, whole, whatever its layout.

What one step computes is decided by the parameters, by what the optimizer keeps of each, and by its count of
steps. A run leaves them as records: the initial parameters, and after each step what the optimizer made.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

from mindspeed_precision.align.lanes import Lanes
from mindspeed_precision.align.layout import canonical
from mindspeed_precision.align.shards import CanonicalRank
from mindspeed_precision.align.start import gathers_late
from mindspeed_precision.align.vocabulary import SETTING, vocabulary_size
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.errors import ConfigError, IncomparableError
from mindspeed_precision.record.elements import to_bits, to_numbers
from mindspeed_precision.record.placement import of_vocabulary
from mindspeed_precision.records import INIT_STEP, RecordKey, Role, Side, TensorRecord

MOMENTS = (Role.EXP_AVG, Role.EXP_AVG_SQ)
_OF_OPTIMIZER = (Role.MASTER_PARAM, *MOMENTS)
_COUNT, _ADAM, _MOMENTUM = "step", "beta1", "momentum"
_REMEDY = "record that run with --precision-debug-config reference, on all ranks"
_REMEDY_INITIAL = (
    "record that run with --precision-debug-set "
    "'capture.rules=[{role: param, phase: init, level: tensor}]', on all ranks"
)


class RecordedStates:
    """The states of a run, one step at a time; elements are read when they are asked for.

    Args:
        run: the run; every rank that holds a part of the model must have recorded it.

    Attributes:
        steps: the steps that are whole on all ranks, ascending.
        first: the step with which the run began: after 0 where a checkpoint was loaded.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        whole = set.intersection(*(set(rank.steps) for rank in run.ranks.values())) - {INIT_STEP}
        self.steps = tuple(sorted(whole))
        first = run.manifest.get("first_step")
        self.first = first if type(first) is int else min(self.steps, default=0)
        self._by_step: dict[int, dict[int, list[TensorRecord]]] = defaultdict(lambda: defaultdict(list))
        for number, rank in run.ranks.items():
            for record in rank.records:
                if _is_state(record.key):
                    self._by_step[record.key.step][number].append(record)
        self._made: dict[int, _Made] = {}

    def before(self, step: int) -> StateBefore:
        """Return the state that the run had before ``step``; `StateBefore.require` says what it lacks."""
        last = INIT_STEP if step == self.first else step - 1
        back = [last]
        while last != INIT_STEP and back[-1] - 1 in self.steps:
            back.append(back[-1] - 1)
        return StateBefore(states=self, run=self._run, step=step, back=tuple(back))

    def after(self, step: int) -> _Made:
        """Return what one step made of the state; of ``INIT_STEP``, the initial parameters."""
        if step not in self._made:
            ranks: dict[int, RankRecords] = {
                number: replace(rank, records=tuple(self._by_step[step][number]))
                for number, rank in self._run.ranks.items()
            }
            found = canonical(replace(self._run, ranks=ranks), Side.BASELINE, lanes=Lanes.NONE)
            rank = found.run.ranks[0]
            assert isinstance(rank, CanonicalRank)
            self._made[step] = _Made(rank=rank, unruled=dict(found.unruled))
        return self._made[step]


def _is_state(key: RecordKey) -> bool:
    number = key.role is Role.HYPERPARAMETER and key.slot in (_COUNT, _ADAM, _MOMENTUM)
    return number or key.role in (Role.PARAM, *_OF_OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What one step made of the state: canonical records."""

    rank: CanonicalRank
    unruled: dict[RecordKey, str]

    @cached_property
    def tensors(self) -> dict[tuple[str, Role], TensorRecord]:
        return {
            (r.key.fqn, r.key.role): r for r in self.rank.records if r.key.role is not Role.HYPERPARAMETER
        }

    @cached_property
    def numbers(self) -> dict[tuple[str, str], float]:
        numbers = (r for r in self.rank.records if r.key.role is Role.HYPERPARAMETER)
        return {(r.key.fqn, r.key.slot): r.value for r in numbers if r.value is not None}

    def updated(self, name: str) -> bool:
        """Tell whether the step updated a parameter; in fp16 an overflow skips it."""
        return any((name, slot) in self.numbers for slot in (_COUNT, _ADAM, _MOMENTUM)) or any(
            (name, role) in self.tensors for role in MOMENTS
        )


@dataclass(frozen=True, kw_only=True)
class StateBefore:
    """What a run began a step with.

    Attributes:
        states: of the run.
        run: the run.
        step: the step.
        back: the steps that made it, the last one first, as far back as all were recorded.
    """

    states: RecordedStates
    run: Run
    step: int
    back: tuple[int, ...]

    @property
    def initial(self) -> bool:
        """Whether the run began here: what its optimizer had then was not recorded."""
        return self.back == (INIT_STEP,)

    @property
    def _last(self) -> _Made:
        return self.states.after(self.back[0])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters of the run, those of copies left out."""
        declared = (p for rank in self.run.ranks.values() for p in rank.parameters)
        return tuple(dict.fromkeys(p.placement.copy_of or p.fqn if p.placement else p.fqn for p in declared))

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits that are equal for equal states, in any layout."""
        told = hashlib.blake2b(digest_size=8)
        tensors = self._last.tensors
        for name, role in sorted(tensors, key=lambda place: (place[0], place[1].value)):
            told.update(f"{name} {role.value} {tensors[name, role].digest.fingerprint:016x}\n".encode())
        return told.hexdigest()

    def require(self) -> None:
        """Check that everything can be read, without reading it.

        Raises:
            ConfigError: something of the state was not recorded, not its elements, or not all of them.
        """
        for name in self.names:
            self._kept(self._there(self._last, name, Role.PARAM))
            for role in _OF_OPTIMIZER:
                found = self._find(name, role)
                if found is not None:
                    self._kept(found[1])

    def parameter(self, name: str, *, shape: tuple[int, ...], dtype: str) -> HostTensor:
        """Return a canonical parameter; of a vocabulary that is padded otherwise, all rows that it has there.

        Args:
            name: of the parameter.
            shape: canonical, as the model that loads it has it.
            dtype: of the parameter there.

        Raises:
            ConfigError: it was not recorded, not its elements, or not all of them.
            IncomparableError: it has another shape or dtype there.
            DumpError: a payload that the index promises cannot be read.
        """
        record = self._there(self._last, name, Role.PARAM)
        self._same_kind(record, shape, dtype)
        master = self._find(name, Role.MASTER_PARAM) if gathers_late(self.run) else None
        if master is None:
            return self._read((self._last, record))
        # recorded before the other ranks' updates had reached it: the gather brings the rounded master
        return HostTensor(bits=to_bits(to_numbers(self._read(master)), dtype), dtype=dtype)

    def of_optimizer(self, name: str, role: Role, *, shape: tuple[int, ...], dtype: str) -> HostTensor | None:
        """Return what the optimizer keeps of a parameter; None: it keeps none, or had not updated it yet.

        Args:
            name: of the parameter.
            role: ``exp_avg``, ``exp_avg_sq`` or ``master_param``.
            shape: canonical.
            dtype: of the tensor that loads it.

        Raises:
            ConfigError: it is there, but was not recorded with all its elements.
            IncomparableError: it has another shape or dtype.
            DumpError: a payload that the index promises cannot be read.
        """
        found = self._find(name, role)
        if found is None:
            return None
        self._same_kind(found[1], shape, dtype)
        return self._read(found)

    def count(self, name: str) -> float | None:
        """Return how many updates the optimizer had counted of a parameter; None: none was made."""
        made = self._last_update(name)
        return None if made is None else made.numbers[name, _COUNT] + 1

    def _find(self, name: str, role: Role) -> tuple[_Made, TensorRecord] | None:
        """Find the last record of what the optimizer keeps."""
        made = self._last_update(name)
        if made is None:
            return None
        if (name, role) in made.tensors:
            return made, self._there(made, name, role)
        if role in MOMENTS and (name, _ADAM) in made.numbers:
            self._refuse(f"did not record {role.value} of {name}")
        return None

    def _last_update(self, name: str) -> _Made | None:
        """Return what the last step made that updated a parameter; None where the run never did."""
        for step in self.back if not self.initial else ():
            made = self.states.after(step)
            if not made.updated(name):
                continue
            if (name, _COUNT) not in made.numbers:
                self._refuse(f"did not record how many updates of {name} its optimizer counted")
            if made.numbers.get((name, _MOMENTUM)):
                self._refuse(f"used momentum for {name}, which is not loaded")
            return made
        if not self.initial and self.back[-1] != self.states.first:
            trained = any(p.trainable for r in self.run.ranks.values() for p in r.parameters if p.fqn == name)
            if trained:
                self._refuse(f"recorded no update of {name} in steps {self.back[-1]} to {self.back[0]}")
        return None

    def _there(self, made: _Made, name: str, role: Role) -> TensorRecord:
        record = made.tensors.get((name, role))
        if record is None:
            self._refuse(f"did not record {name}")
        if record.key in made.unruled:
            self._refuse(f"has {_what(record)} in parts: {made.unruled[record.key]}")
        return record

    def _kept(self, record: TensorRecord) -> None:
        if record.payload is None:
            self._refuse(f"did not keep the elements of {_what(record)}")

    def _read(self, found: tuple[_Made, TensorRecord]) -> HostTensor:
        made, record = found
        self._kept(record)
        return made.rank.payload(record)

    def _refuse(self, why: str) -> NoReturn:
        when = "in its initial parameters" if self.initial else f"before step {self.step}"
        raise ConfigError(
            f"the state {when} cannot be taken from this run: it {why}",
            where=str(self.run.path),
            remedy=_REMEDY_INITIAL if self.initial else _REMEDY,
        )

    def _same_kind(self, record: TensorRecord, shape: tuple[int, ...], dtype: str) -> None:
        padded = of_vocabulary(record.key.fqn) and vocabulary_size(self.run) is not None
        fits = record.shape[1:] == shape[1:] if padded else record.shape == shape
        if not fits or record.dtype != dtype:
            raise IncomparableError(
                f"that run's {_what(record)} is of another kind",
                where=str(self.run.path),
                found=f"{record.dtype}{list(record.shape)}",
                expected=f"{dtype}{list(shape)}",
                remedy="take a run of the same model; one that pads the vocabulary otherwise must say how "
                f"long it is (setting {SETTING})",
            )


def _what(record: TensorRecord) -> str:
    key = record.key
    return key.fqn if key.role is Role.PARAM else f"{key.role.value} of {key.fqn}"
