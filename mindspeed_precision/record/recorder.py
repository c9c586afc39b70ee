"""From observations to records on disk: digests begin when a tensor is seen and end once per step."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from mindspeed_precision.backends.base import Backend, Form, HostTensor, PlacingBackend
from mindspeed_precision.config import Settings
from mindspeed_precision.counting import count
from mindspeed_precision.dump.collection import no_collection
from mindspeed_precision.dump.encode import RecordLine, digest_text, form_text, origin_text
from mindspeed_precision.dump.format import Problem
from mindspeed_precision.dump.writer import RankWriter
from mindspeed_precision.record.site import Site, SiteTable
from mindspeed_precision.record.statistics import digest_host, digest_number
from mindspeed_precision.record.watch import Onlooker
from mindspeed_precision.records import INIT_STEP, NO_MICROBATCH, Digest, Part, Phase, Place, Role
from mindspeed_precision.redaction import redact_text

_PATIENCE = 10.0
"""Seconds that a failed run waits for its device."""

_NUMBER = Form(shape=(), dtype="float64", layout=None)


@dataclass(slots=True)
class _Pending:
    """A record of the running step; ``digest`` is the text of a record line, or ``handle`` will give it."""

    site: Site
    form: Form
    digest: str | None
    handle: Any
    snapshot: Any
    note: str
    part: tuple[int, int] | None
    place: Place | None = None


_form_text = lru_cache(maxsize=8192)(lambda form: form_text(form.shape, form.dtype, form.layout))
_origin_text = lru_cache(maxsize=8192)(origin_text)


@lru_cache(maxsize=8192)
def _number_text(bits: bytes) -> str:
    """Return the digest of a float64, by its bits: hyperparameters are the same for all parameters."""
    return digest_text(digest_number(struct.unpack("<d", bits)[0]))


def _texts(digests: Sequence[Digest]) -> Iterator[str]:
    """Yield the text of each digest; what was found twice in a step is written once."""
    texts: dict[int, str] = {}
    for digest in digests:
        text = texts.get(id(digest))
        if text is None:
            text = texts[id(digest)] = digest_text(digest)
        yield text


class Recorder:
    """Takes observations during a step and writes their records at its end.

    ``observe*`` never raise and never wait for the device: a tensor that cannot be recorded becomes a
    problem line, which readers report. ``end_step`` waits once.

    Args:
        backend: the framework of the tensors.
        writer: where this rank's records go.
        settings: which steps and records are kept, and how much of them.
        watch: is shown what was recorded of each step; None: nobody looks.

    Attributes:
        step: the current step; ``INIT_STEP`` before the first.
    """

    def __init__(
        self, *, backend: Backend, writer: RankWriter, settings: Settings, watch: Onlooker | None = None
    ) -> None:
        self._backend = backend
        self._watch = watch
        self._writer = writer
        self._settings = settings
        self._sites = SiteTable(settings.capture)
        self._pending: list[_Pending] = []
        self._problems: list[Problem] = []
        self._microbatches = 0
        self._next_seq = 0
        self.begin_step(INIT_STEP)

    def begin_step(self, step: int) -> None:
        """Start a step; outside ``settings.steps`` nothing is wanted (``INIT_STEP`` always is)."""
        self.step = step
        self._wanted = step == INIT_STEP or step in self._settings.steps
        self._sites.begin_step(step)

    @property
    def recording(self) -> bool:
        """Whether the running step is recorded: outside ``settings.steps`` nothing is to be computed."""
        return self._wanted

    def site(
        self,
        phase: Phase,
        fqn: str,
        role: Role,
        slot: str = "",
        microbatch: int = NO_MICROBATCH,
        occurrence: int = 0,
        recomputed: bool = False,
    ) -> Site | None:
        """Return the site of a record, which ``observe*`` take; None: the record is not wanted.

        Arguments are those of ``RecordKey``; the step is the running one.
        """
        if microbatch >= self._microbatches:
            self._microbatches = microbatch + 1
        if not self._wanted:
            return None
        return self._sites.find((phase, fqn, role, slot, microbatch, occurrence, recomputed))

    def observe(
        self, site: Site, tensor: Any, *, note: str = "", part: Part | None = None, place: Place | None = None
    ) -> None:
        """Begin the digest of a live tensor, and its copy at level ``tensor``; keeps no reference to it.

        Args:
            site: of the record.
            tensor: the framework's tensor.
            note: how the tensor came about, where it is not simply what the role says
                (``difference of main_grad``: dW of a fused GEMM).
            part: which elements of a canonical tensor it is; None: it is numbered by itself.
            place: where an activation sits in the canonical one, or why that is not known; None: not said.
        """
        backend = self._backend
        try:
            self._pending.append(
                _Pending(
                    site,
                    backend.form(tensor),
                    None,
                    self._begin_digest(site, tensor, part),
                    backend.snapshot(tensor) if site.payload else None,
                    note,
                    None if part is None or place else (part.start, part.stop),
                    place,
                )
            )
        except Exception as error:  # noqa: BLE001  the training must go on; the reader reports the loss
            self._add_problem(self._describe(site), error)

    def _begin_digest(self, site: Site, tensor: Any, part: Part | None) -> Any:
        backend = self._backend
        if part is None:
            return backend.begin_digest(tensor, statistics=site.statistics, sketch=site.sketch)
        assert isinstance(backend, PlacingBackend)  # capture places nothing elsewhere
        return backend.begin_placed_digest(tensor, part, statistics=site.statistics, sketch=site.sketch)

    def observe_number(self, site: Site, value: float | int | bool) -> None:
        """Record a host number as float64 with its exact bits, and its statistics at every level."""
        try:
            digest = _number_text(struct.pack("<d", value))
        except Exception as error:  # noqa: BLE001  as above
            self._add_problem(self._describe(site), error)
            return
        self._pending.append(_Pending(site, _NUMBER, digest, None, None, "", None))

    def observe_bytes(self, site: Site, data: bytes) -> None:
        """Record host bytes as a uint8 vector (the state of a random generator, say)."""
        try:
            host = HostTensor(bits=np.frombuffer(data, dtype=np.uint8), dtype="uint8")
            digest = digest_text(digest_host(host, statistics=site.statistics))
        except Exception as error:  # noqa: BLE001  as above
            self._add_problem(self._describe(site), error)
            return
        form = Form(shape=host.bits.shape, dtype="uint8", layout=None)
        self._pending.append(_Pending(site, form, digest, None, host if site.payload else None, "", None))

    def end_step(self) -> list[Problem]:
        """Wait for the device once, then write the step: payloads, records, marker.

        A step that is not wanted leaves no trace, not even a marker.

        Returns:
            What could not be recorded in this step.

        Raises:
            DumpError: the disk refuses this step, or has refused an earlier one that was still to be written.
        """
        pending, self._pending = self._pending, []
        if self._wanted:
            with no_collection():
                self._write(pending)
            self._sites.end_step(len(pending))
        problems, self._problems = self._problems, []
        self._microbatches = 0
        return problems

    def _write(self, pending: list[_Pending]) -> None:
        records, kept = [], {}
        finished = self._finish(pending)
        for seq, (item, digest) in enumerate(finished, start=self._next_seq):
            records.append(self._line(seq, item, digest))
            if item.snapshot is not None:
                kept[seq] = item.snapshot
        self._writer.write_lines(
            self.step,
            records,
            _Payloads(self._backend, kept),
            microbatches=self._microbatches,
            problems=self._problems,
        )
        self._next_seq += len(records)
        if self._watch is not None:
            self._watch.end_step(self.step, [(item.site.key, digest) for item, digest in finished])

    def _line(self, seq: int, item: _Pending, digest: str) -> RecordLine:
        return RecordLine(
            seq,
            self.step,
            item.site.key.microbatch,
            item.site.text,
            _form_text(item.form),
            digest,
            _origin_text(item.note, item.part),
            item.place,
        )

    def close(self, *, complete: bool) -> None:
        """Close the dump.

        Records of a step that did not end are dropped where the run ended as planned. Else they may show why
        it did not: they are written without a marker, and without elements.

        Args:
            complete: the run ended as planned. False never raises, so that the training's own error is seen.

        Raises:
            DumpError: ``complete``, and the disk refuses.
        """
        pending, self._pending = self._pending, []
        if not complete and self._wanted and pending:
            with suppress(Exception):  # the training's own error is what counts
                self._write_unfinished(pending)
        self._writer.close(complete=complete)

    def abandon(self) -> None:
        """Close the dump without a seal; records of the running step are dropped: some were not taken."""
        self._pending = []
        self._writer.close(complete=False)

    def _write_unfinished(self, pending: list[_Pending]) -> None:
        finished: list[tuple[_Pending, str]] = []
        # a device may wait for ever: for a collective with a rank that is gone
        asking = threading.Thread(target=lambda: finished.extend(self._finish(pending)), daemon=True)
        asking.start()
        asking.join(_PATIENCE)
        if asking.is_alive():
            return
        lines = [self._line(seq, item, text) for seq, (item, text) in enumerate(finished, self._next_seq)]
        self._writer.write_unfinished(lines)
        if self._watch is not None:
            self._watch.end_step(self.step, [(item.site.key, digest) for item, digest in finished])

    def _finish(self, pending: list[_Pending]) -> list[tuple[_Pending, str]]:
        waiting = [item for item in pending if item.digest is None]
        try:
            finished = _texts(self._backend.finish_digests([item.handle for item in waiting]))
            return [(item, item.digest if item.digest is not None else next(finished)) for item in pending]
        except Exception as error:  # noqa: BLE001  as in observe
            self._add_problem(f"{count(len(waiting), 'tensor')} of step {self.step}", error)
            return [(item, item.digest) for item in pending if item.digest is not None]

    def _describe(self, site: Site) -> str:
        return replace(site.key, step=self.step).describe()

    def _add_problem(self, record: str, error: Exception) -> None:
        message = redact_text(" ".join(str(error).split())) or type(error).__name__
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
