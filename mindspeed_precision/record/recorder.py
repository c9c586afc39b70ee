"""From observations to records on disk: digests begin when a tensor is seen and end once per step."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_precision.backends.base import Backend, HostTensor, PlacingBackend
from mindspeed_precision.config import Settings
from mindspeed_precision.dump.format import Problem
from mindspeed_precision.dump.writer import RankWriter
from mindspeed_precision.record.statistics import digest_host, digest_number
from mindspeed_precision.records import (
    INIT_STEP,
    NO_MICROBATCH,
    Digest,
    Layout,
    Level,
    Observation,
    Phase,
    Place,
    RecordKey,
    Role,
    TensorRecord,
)

_PRINTED = (Role.LOSS, Role.GRAD_NORM)
"""What a log prints, and every report wants the value of, whatever the level is."""


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A record of the running step; either ``digest`` is known or ``handle`` will give it."""

    key: RecordKey
    shape: tuple[int, ...]
    dtype: str
    note: str
    layout: Layout | None = None
    digest: Digest | None = None
    handle: Any = None
    snapshot: Any = None
    part: tuple[int, int] | None = None
    place: Place | None = None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: thousands of small objects, none in a cycle, would set it off many times."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Recorder:
    """Takes observations during a step and writes their records at its end.

    ``observe*`` never raise and never wait for the device: a tensor that cannot be recorded becomes a
    problem line, which readers report. ``end_step`` waits once.

    Args:
        backend: the framework of the tensors.
        writer: where this rank's records go.
        settings: which steps and records are kept, and how much of them.

    Attributes:
        step: the current step; ``INIT_STEP`` before the first.
    """

    def __init__(self, *, backend: Backend, writer: RankWriter, settings: Settings) -> None:
        self.step = INIT_STEP
        self._backend = backend
        self._writer = writer
        self._settings = settings
        self._by_step = any(rule.steps.ranges for rule in settings.capture.rules)
        self._by_microbatch = any(rule.microbatches.ranges for rule in settings.capture.rules)
        self._wanted = True
        self._levels: dict[tuple[Phase, str, Role, int], Level | None] = {}
        self._pending: list[_Pending] = []
        self._problems: list[Problem] = []
        self._microbatches = 0
        self._next_seq = 0

    def begin_step(self, step: int) -> None:
        """Start a step; outside ``settings.steps`` nothing is wanted (``INIT_STEP`` always is)."""
        self.step = step
        self._wanted = step == INIT_STEP or step in self._settings.steps
        if self._by_step:
            self._levels.clear()

    def level_of(self, key: RecordKey) -> Level | None:
        """Return how much of ``key`` is kept, or None where nothing is."""
        if key.microbatch >= self._microbatches:
            self._microbatches = key.microbatch + 1
        if not self._wanted:
            return None
        short = (key.phase, key.fqn, key.role, key.microbatch if self._by_microbatch else NO_MICROBATCH)
        if short not in self._levels:
            self._levels[short] = self._settings.capture.level_of(key)
        return self._levels[short]

    def observe(self, observation: Observation) -> None:
        """Begin the digest of a live tensor, and its copy at level ``tensor``; keeps no reference to it."""
        level = self.level_of(observation.key)
        if level is None:
            return
        backend, tensor, part = self._backend, observation.tensor, observation.part
        try:
            self._pending.append(
                _Pending(
                    key=observation.key,
                    shape=backend.shape(tensor),
                    dtype=backend.dtype(tensor),
                    note=observation.note,
                    layout=backend.layout(tensor),
                    handle=self._begin_digest(observation, level),
                    snapshot=backend.snapshot(tensor) if level is Level.TENSOR else None,
                    part=None if part is None or observation.place else (part.start, part.stop),
                    place=observation.place,
                )
            )
        except Exception as error:  # noqa: BLE001  the training must go on; the reader reports the loss
            self._add_problem(observation.key.describe(), error)

    def _begin_digest(self, observation: Observation, level: Level) -> Any:
        backend = self._backend
        statistics = level.includes(Level.STATISTICS) or observation.key.role in _PRINTED
        sketch = level.includes(Level.SKETCH)
        if observation.part is None:
            return backend.begin_digest(observation.tensor, statistics=statistics, sketch=sketch)
        assert isinstance(backend, PlacingBackend)  # capture places nothing elsewhere
        return backend.begin_placed_digest(
            observation.tensor, observation.part, statistics=statistics, sketch=sketch
        )

    def observe_number(self, key: RecordKey, value: float | int | bool, *, note: str = "") -> None:
        """Record a host number as float64 with its exact bits, and its statistics at every level."""
        if self.level_of(key) is None:
            return
        try:
            digest = digest_number(float(value))
        except Exception as error:  # noqa: BLE001  as above
            self._add_problem(key.describe(), error)
            return
        self._pending.append(_Pending(key=key, shape=(), dtype="float64", note=note, digest=digest))

    def observe_bytes(self, key: RecordKey, data: bytes, *, note: str = "") -> None:
        """Record host bytes as a uint8 vector (the state of a random generator, say)."""
        level = self.level_of(key)
        if level is None:
            return
        try:
            host = HostTensor(bits=np.frombuffer(data, dtype=np.uint8), dtype="uint8")
            digest = digest_host(host, statistics=level.includes(Level.STATISTICS))
        except Exception as error:  # noqa: BLE001  as above
            self._add_problem(key.describe(), error)
            return
        snapshot = host if level is Level.TENSOR else None
        pending = _Pending(
            key=key, shape=host.bits.shape, dtype="uint8", note=note, digest=digest, snapshot=snapshot
        )
        self._pending.append(pending)

    def end_step(self) -> list[Problem]:
        """Wait for the device once, then write the step: payloads, records, marker.

        A step that is not wanted leaves no trace, not even a marker.

        Returns:
            What could not be recorded in this step.

        Raises:
            DumpError: the disk refuses. Nothing of the step counts as recorded then.
        """
        pending, self._pending = self._pending, []
        if self._wanted:
            with _no_collection():
                self._write(pending)
        problems, self._problems = self._problems, []
        self._microbatches = 0
        return problems

    def _write(self, pending: list[_Pending]) -> None:
        digests = self._finish(pending)
        records = [
            TensorRecord(
                seq=self._next_seq + position,
                key=item.key,
                shape=item.shape,
                dtype=item.dtype,
                layout=item.layout,
                digest=digest,
                note=item.note,
                part=item.part,
                place=item.place,
            )
            for position, (item, digest) in enumerate(digests)
        ]
        kept = {
            self._next_seq + position: item.snapshot
            for position, (item, _) in enumerate(digests)
            if item.snapshot is not None
        }
        self._writer.write_step(
            self.step,
            records,
            _Payloads(self._backend, kept),
            microbatches=self._microbatches,
            problems=self._problems,
        )
        self._next_seq += len(records)

    def close(self, *, complete: bool) -> None:
        """Close the dump; records of a step that did not end are dropped.

        Args:
            complete: the run ended as planned. False never raises, so that the training's own error is seen.

        Raises:
            DumpError: ``complete``, and the disk refuses.
        """
        self._pending = []
        self._writer.close(complete=complete)

    def _finish(self, pending: list[_Pending]) -> list[tuple[_Pending, Digest]]:
        waiting = [item for item in pending if item.digest is None]
        try:
            finished = iter(self._backend.finish_digests([item.handle for item in waiting]))
            return [(item, item.digest if item.digest is not None else next(finished)) for item in pending]
        except Exception as error:  # noqa: BLE001  as in observe
            self._add_problem(f"all {len(waiting)} tensors of step {self.step}", error)
            return [(item, item.digest) for item in pending if item.digest is not None]

    def _add_problem(self, record: str, error: Exception) -> None:
        message = " ".join(str(error).split()) or type(error).__name__
        self._problems.append(Problem(step=self.step, record=record, reason=message))


class _Payloads(Mapping[int, HostTensor]):
    """Snapshots by ``seq``, copied to the host only when the writer asks for them."""

    def __init__(self, backend: Backend, snapshots: Mapping[int, Any]) -> None:
        self._backend = backend
        self._snapshots = snapshots

    def __getitem__(self, seq: int) -> HostTensor:
        snapshot = self._snapshots[seq]
        return snapshot if isinstance(snapshot, HostTensor) else self._backend.to_host(snapshot)

    def __contains__(self, seq: object) -> bool:
        return seq in self._snapshots

    def __iter__(self) -> Iterator[int]:
        return iter(self._snapshots)

    def __len__(self) -> int:
        return len(self._snapshots)
