"""Record lines as text, piece by piece, so that what does not change from step to step is written once.

``dump.format`` reads the lines back.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_precision.records import Digest, Layout, Place, RecordKey, Sketch, Statistics, TensorRecord

_string = json.JSONEncoder().encode
_BINS = tuple(f'"{number}":' for number in range(256))


def key_text(key: RecordKey) -> str:
    """Return the identity of a record, without its step."""
    recomputed = "true" if key.recomputed else "false"
    return (
        f'"microbatch":{key.microbatch},"phase":"{key.phase.value}","fqn":{_string(key.fqn)},'
        f'"role":"{key.role.value}","slot":{_string(key.slot)},"occurrence":{key.occurrence},'
        f'"recomputed":{recomputed}'
    )


def form_text(shape: Iterable[int], dtype: str, layout: Layout | None) -> str:
    """Return shape, element type and layout of a record."""
    return f'"shape":{_integers(shape)},"dtype":{_string(dtype)},"layout":{_layout(layout)}'


def _layout(layout: Layout | None) -> str:
    if layout is None:
        return "null"
    contiguous = "true" if layout.contiguous else "false"
    return (
        f'{{"stride":{_integers(layout.stride)},"storage_offset":{layout.storage_offset},'
        f'"contiguous":{contiguous},"format":{_string(layout.format)}}}'
    )


def _integers(values: Iterable[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def digest_text(digest: Digest) -> str:
    """Return fingerprints, statistics and sketch of a record."""
    statistics, sketch = digest.statistics, digest.sketch
    return (
        f'"fingerprint":"{digest.fingerprint:016x}","unordered":"{digest.unordered:016x}",'
        f'"statistics":{"null" if statistics is None else _statistics(statistics)},'
        f'"sketch":{"null" if sketch is None else _sketch(sketch)}'
    )


def _statistics(statistics: Statistics) -> str:
    bins = ",".join([f"{_BINS[number]}{count}" for number, count in statistics.exponents.items()])
    return (
        f'{{"minimum":{_number(statistics.minimum)},"maximum":{_number(statistics.maximum)},'
        f'"mean":{_number(statistics.mean)},"l2_norm":{_number(statistics.l2_norm)},'
        f'"zeros":{statistics.zeros},"nans":{statistics.nans},"infs":{statistics.infs},'
        f'"exponents":{{{bins}}}}}'
    )


def _number(value: float) -> str:
    """Return a number as JSON; what is not finite as a string, since JSON has no word for it."""
    return repr(float(value)) if math.isfinite(value) else f'"{float(value)}"'


def _sketch(sketch: Sketch) -> str:
    return f'{{"values":"{base64.b64encode(sketch.data).decode()}","roundoff":{float(sketch.roundoff)!r}}}'


def origin_text(note: str, part: tuple[int, int] | None) -> str:
    """Return the note and the part of a record."""
    return f'"note":{_string(note)},"part":{"null" if part is None else _integers(part)}'


@dataclass(slots=True)
class RecordLine:
    """A record, written but for the file in which its elements lie.

    Attributes:
        seq: position in the rank's execution order.
        step: the step.
        microbatch: the microbatch: elements lie in a file of it.
        key: by ``key_text``.
        form: by ``form_text``.
        digest: by ``digest_text``.
        origin: by ``origin_text``.
        place: of an activation; its number is for the writer to give.
    """

    seq: int
    step: int
    microbatch: int
    key: str
    form: str
    digest: str
    origin: str
    place: Place | None = None

    @classmethod
    def of(cls, record: TensorRecord) -> RecordLine:
        """Write a record; its ``payload`` and the number of its place are left to ``text``."""
        return cls(
            seq=record.seq,
            step=record.key.step,
            microbatch=record.key.microbatch,
            key=key_text(record.key),
            form=form_text(record.shape, record.dtype, record.layout),
            digest=digest_text(record.digest),
            origin=origin_text(record.note, record.part),
            place=record.place,
        )

    def text(self, payload: str | None, place: int | None) -> str:
        """Return the line as JSON, without its newline.

        Args:
            payload: name of the file that holds the elements; or None.
            place: number under which the place was declared; or None.
        """
        number = "null" if place is None else place
        file = "null" if payload is None else _string(payload)
        return (
            f'{{"kind":"record","seq":{self.seq},"step":{self.step},{self.key},{self.form},{self.digest},'
            f'"payload":{file},{self.origin},"placement":{number}}}'
        )
