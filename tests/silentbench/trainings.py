"""Record what cases need, each training once, several in one start of the processes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.testing.demo.launch import run_training
from silentbench.case import Training
from silentbench.cases import every
from silentbench.healthy import grid

SCRIPT = Path(__file__).with_name("record.py")
LEVEL = ("capture.level=tensor",)
"""All elements are kept, as in the second pass of ``compare --refine``: these models are tiny."""
AT_ONCE = 8
"""Trainings in one start of the processes: Gloo's threads of earlier ones stay."""
SECONDS_EACH = 60


@cache
def known() -> dict[str, Training]:
    """Return every training that a case or the healthy grid has, by name."""
    trainings = [t for case in every().values() for t in case.trainings]
    trainings += [t for pair in grid() for t in pair]
    return {training.name: training for training in trainings}


def record_all(trainings: Iterable[Training], runs: Path, megatron: Path) -> dict[str, str]:
    """Record those trainings that are not in ``runs`` yet.

    Returns:
        Why a training could not be recorded, by name.
    """
    failures: dict[str, str] = {}
    missing = {t.name: t for t in trainings if not done(runs, t)}
    for batch in _batches(missing.values()):
        waiting = list(batch)
        while waiting:
            waiting, failed = _record(waiting, runs, megatron)
            failures.update(failed)
    return failures


def done(runs: Path, training: Training) -> bool:
    """Tell whether a training was recorded to its end."""
    return (runs / f"{training.name}.json").is_file()


def _batches(trainings: Iterable[Training]) -> Iterator[list[Training]]:
    """Group by size; what others begin with comes first."""
    order = sorted(trainings, key=lambda t: (t.start is not None, t.world))
    for _, group in groupby(order, key=lambda t: (t.start is not None, t.world)):
        alike = list(group)
        for first in range(0, len(alike), AT_ONCE):
            yield alike[first : first + AT_ONCE]


def _record(batch: list[Training], runs: Path, megatron: Path) -> tuple[list[Training], dict[str, str]]:
    """Record a batch; return what is left of it after one that failed, and why that one did."""
    for training in batch:
        shutil.rmtree(runs / training.name, ignore_errors=True)
    names = [training.name for training in batch]
    sys.stderr.write(f"recording on {batch[0].world}: {' '.join(names)}\n")
    reason = "it did not end as it should"
    try:
        run_training(
            SCRIPT,
            [str(runs), *names],
            processes=batch[0].world,
            megatron=megatron,
            log=runs / f"{names[0]}.log",
            timeout=SECONDS_EACH * (len(batch) + 1),
        )
    except ExternalCommandError as error:
        reason = str(error)
    left = [training for training in batch if not done(runs, training)]
    if not left:
        return [], {}
    return left[1:], {left[0].name: reason}
