"""Where samples come from: a recorded run, an indexed data set of Megatron, a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.counting import count as counted
from mindspeed_precision.dump.object_store import is_url, shown
from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.errors import ConfigError, DumpError
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import INIT_STEP
from mindspeed_precision.samples.indexed import IndexedDataset, is_indexed, open_indexed
from mindspeed_precision.samples.tokens import Decoder
from mindspeed_precision.verify.pair.batches import SAMPLE_IDS, Microbatch, batches_of

TEXT = "text"
"""Slot of what was not cut into tokens: the bytes of UTF-8."""

LONGEST_LINE = 16 << 20
"""Bytes of a line of a JSONL file; a longer one is no sample."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the model gets of one sample.

    Attributes:
        place: where it was read, for a person.
        slots: its tensors by name (``tokens``, ``labels``, ``loss_mask`` …), without the batch's dimension.
        number: of the sample in its data set; None: not known.
        step: of training; 0 where there is none.
    """

    place: str
    slots: Mapping[str, NDArray[Any]]
    number: int | None = None
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Source:
    """Samples, in order.

    Attributes:
        path: as it was given.
        kind: what it was read as.
        samples: the first of them.
        run: where it is a recorded run.
        notes: what a reader must know.
    """

    path: str
    kind: str
    samples: tuple[Sample, ...]
    run: Run | None = None
    notes: tuple[str, ...] = field(default=())


def open_source(
    path: str | Path,
    *,
    count: int,
    step: int | None = None,
    decoder: Decoder | None = None,
    seq_length: int | None = None,
    json_key: str = TEXT,
) -> Source:
    """Read the first samples of a source.

    Args:
        path: a run directory, the prefix of a ``.bin`` and ``.idx``, or a JSONL file.
        count: how many.
        step: of a run, only this one.
        decoder: cuts the texts of a JSONL file into tokens.
        seq_length: of an indexed data set: cut its stream into samples of so many tokens; None: its
            sequences.
        json_key: where a JSONL file has its text.

    Raises:
        DumpError: a run or data set cannot be read, or has no batches.
        ConfigError: there is nothing of the kind, or a line is no sample.
    """
    if is_url(path):
        return _from_run(load_run(path), shown(str(path)), count, step)
    where = Path(path)
    if where.is_dir():
        return _from_run(load_run(where), str(path), count, step)
    if is_indexed(where):
        return _from_indexed(open_indexed(where), str(path), count, seq_length)
    if where.is_file() and where.suffix in (".jsonl", ".json"):
        return _from_lines(where, str(path), count, decoder, json_key)
    raise ConfigError(
        "no data that can be read",
        where=str(path),
        expected="a run directory, the prefix of a .bin and .idx, or a .jsonl file",
    )


def _from_run(run: Run, path: str, count: int, step: int | None) -> Source:
    steps = sorted({one for rank in run.ranks.values() for one in rank.steps} - {INIT_STEP})
    if step is not None and step not in steps:
        raise DumpError(
            "this step was not recorded", where=path, found=str(step), expected=f"one of {steps[:8]}"
        )
    batches = batches_of(run, steps if step is None else [step])
    if not batches:
        raise DumpError(
            "this run has no batches", where=path, remedy="record it with capture.batch=true (the default)"
        )
    kept = {
        place: batch for place, batch in batches.items() if batch.elements(batch.content_slot) is not None
    }
    notes = list(run.notes)
    if len(kept) < len(batches):
        lost = f"{len(batches) - len(kept)} of {counted(len(batches), 'batch')}"
        notes.append(
            f"{path}: the elements of {lost} were not kept, so that their samples cannot be shown; record "
            "with --precision-debug-set capture.rules=[{phase: batch, level: tensor}]"
        )
    samples = islice((one for place, batch in kept.items() for one in _rows(place, batch)), count)
    return Source(path=path, kind="a recorded run", samples=tuple(samples), run=run, notes=tuple(notes))


def _rows(place: tuple[int, int, int, int, int], batch: Microbatch) -> Iterator[Sample]:
    step, lane, _, microbatch, _ = place
    tensors = {slot: held for slot in batch.slots if (held := batch.elements(slot)) is not None}
    numbers = {slot: np.asarray(to_numbers(held)) for slot, held in tensors.items()}
    content = numbers[batch.content_slot]
    rows = content.shape[0] if content.ndim > 1 else 1
    ids = numbers.pop(SAMPLE_IDS, None)
    for row in range(rows):
        slots = {
            slot: value[row] if content.ndim > 1 and value.ndim and len(value) == rows else value
            for slot, value in numbers.items()
        }
        known = None if ids is None or ids.size != rows else int(ids.reshape(-1)[row])
        where = f"step {step}, microbatch {microbatch}, data-parallel rank {lane}"
        yield Sample(place=f"{where}, row {row}" if rows > 1 else where, slots=slots, number=known, step=step)


def _from_indexed(dataset: IndexedDataset, path: str, count: int, seq_length: int | None) -> Source:
    if seq_length is None:
        samples = [
            Sample(place=f"sequence {number}", slots={"tokens": dataset.sequence(number)}, number=number)
            for number in range(min(count, len(dataset)))
        ]
        note = "sequences as they are stored; --seq-length N cuts the stream as a model reads it"
    else:
        if seq_length < 1:
            raise ConfigError("no length of a sample", where="--seq-length", found=str(seq_length))
        samples = [
            Sample(
                place=f"window {number}", slots={"tokens": window[:-1], "labels": window[1:]}, number=number
            )
            for number, window in enumerate(islice(dataset.windows(seq_length), count))
        ]
        note = "the stream in the order in which it is stored: a training shuffles documents and samples"
    about = f"{counted(len(dataset), 'sequence')} of {dataset.dtype.name}"
    return Source(
        path=path, kind=f"a Megatron data set ({about})", samples=tuple(samples), notes=(f"{path}: {note}",)
    )


def _from_lines(file: Path, path: str, count: int, decoder: Decoder | None, key: str) -> Source:
    samples: list[Sample] = []
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(_lines(stream, path)):
                if len(samples) == count:
                    break
                slots = _slots(line, decoder, key, where=f"{path}:{number + 1}")
                samples.append(Sample(place=f"line {number + 1}", slots=slots, number=number))
    except OSError as error:
        raise DumpError(f"cannot read: {error.strerror}", where=path) from error
    notes = []
    if decoder is not None and any(TEXT in one.slots for one in samples):
        notes.append(f"{path}: {decoder.name} can only decode, so that texts were not cut into tokens")
    return Source(path=path, kind="JSONL", samples=tuple(samples), notes=tuple(notes))


def _lines(stream: Any, path: str) -> Iterator[bytes]:
    while line := stream.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise ConfigError(
                "a line is too long for a sample", where=path, expected=f"at most {LONGEST_LINE} bytes"
            )
        if line.strip():
            yield line


def _slots(line: bytes, decoder: Decoder | None, key: str, where: str) -> dict[str, NDArray[Any]]:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("not readable as JSON", where=where, found=str(error)[:120]) from error
    if not isinstance(plain, dict):
        raise ConfigError("not an object", where=where, found=type(plain).__name__)
    slots = {name: _array(value) for name, value in plain.items() if _is_numbers(value)}
    text = plain.get(key)
    if isinstance(text, str):
        ids = None if decoder is None else decoder.ids(text)
        if ids is None:
            slots[TEXT] = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        else:
            slots["tokens"] = np.asarray(ids, dtype=np.int64)
    if not slots:
        raise ConfigError(
            "no sample in this line",
            where=where,
            found=", ".join(list(plain)[:5]),
            expected=f"a text under {key!r}, or lists of numbers (tokens, labels, loss_mask)",
            remedy="--json-key says where the text is",
        )
    return slots


def _is_numbers(value: Any) -> bool:
    flat = isinstance(value, list) and bool(value)
    return flat and all(isinstance(one, (int, float)) for one in value)


def _array(value: Iterable[Any]) -> NDArray[Any]:
    numbers = np.asarray(list(value))
    return numbers if numbers.dtype != object else numbers.astype(np.float64)


__all__ = ["TEXT", "Sample", "Source", "open_source"]
