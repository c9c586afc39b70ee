"""A run directory as one side: the parameters that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_precision.align.state import RecordedStates
from mindspeed_precision.ckpt.stored import Checkpoint, Stored, geometry_of
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.records import INIT_STEP, Role
from mindspeed_precision.verify.settings import settings_of


def read_run(directory: Path, given: str) -> Checkpoint:
    """Read the initial parameters of a recorded run, its ranks put together.

    Raises:
        CheckpointError: none were recorded.
        DumpError: it cannot be read.
    """
    run = load_run(directory)
    made = RecordedStates(run).after(INIT_STEP)
    tensors: dict[str, Stored] = {}
    unread = []
    for (name, role), record in made.tensors.items():
        if role is not Role.PARAM:
            continue
        if record.key in made.unruled:
            unread.append(f"{name}: {made.unruled[record.key]}")
            continue
        load = None
        if record.payload is not None:
            load = lambda record=record: made.rank.payload(record).bits  # noqa: E731
        tensors[name] = Stored(
            name=name,
            shape=record.shape,
            dtype=record.dtype,
            source=f"record {record.seq}" if load is None else str(record.payload),
            load=load,
            record=record,
        )
    if not tensors:
        raise CheckpointError(
            "a run that recorded no initial parameters",
            where=given,
            remedy="record it with capture.optimizer=true and keep what is before the first step",
        )
    arguments: Mapping[str, Any] = settings_of(run).arguments
    digests = sum(one.load is None for one in tensors.values())
    notes = [f"of {digests} parameters the run kept digests alone, no elements"] if digests else []
    return Checkpoint(
        path=given,
        form="recorded run, its initial parameters",
        family="run",
        tensors=tensors,
        config=arguments,
        geometry=geometry_of(arguments),
        unread=tuple(unread),
        notes=(*notes, *run.notes),
    )


__all__ = ["read_run"]
