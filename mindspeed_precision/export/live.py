"""Export while training: what was recorded of a step goes to the dashboards at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mindspeed_precision.config import ExportSettings
from mindspeed_precision.export.values import StepValues, seen_of_text
from mindspeed_precision.export.writers import TensorBoardWriter, ValueWriter, WandbWriter
from mindspeed_precision.records import INIT_STEP, RecordKey


def rank_name(rank: int) -> str:
    """Return what a rank is called beside others of its run."""
    return f"rank{rank:05d}"


def open_live(settings: ExportSettings, out: Path, *, rank: int) -> LiveExport | None:
    """Open what the settings ask for; None: nothing.

    Args:
        settings: ``export`` of a run.
        out: its directory; its name names the run.
        rank: which.

    Raises:
        PrecisionError: a package is not installed.
        DumpError: the directory has event files, or cannot be made.
    """
    writers: list[ValueWriter] = []
    if settings.tensorboard:
        writers.append(TensorBoardWriter(Path(settings.tensorboard) / out.name / rank_name(rank)))
    if settings.wandb:
        name = f"{out.name}/{rank_name(rank)}"
        writers.append(WandbWriter(settings.wandb, run=name, group=out.name, configuration={"run": str(out)}))
    return LiveExport(writers) if writers else None


class LiveExport:
    """Looks at each step when it is written. A writer that fails is left out from then on, and said.

    Args:
        writers: where the numbers go.
    """

    def __init__(self, writers: Sequence[ValueWriter]) -> None:
        self._writers = list(writers)

    def end_step(self, step: int, seen: Sequence[tuple[RecordKey, str]]) -> None:
        """Export a step.

        Args:
            step: which; what was before the first is no step of a dashboard.
            seen: its records: identity and text of the digest.
        """
        if step == INIT_STEP or not self._writers:
            return
        collected = StepValues()
        for key, digest in seen:
            one = seen_of_text(key, digest)
            if one is not None:
                collected.add(one)
        values = collected.values()
        for writer in list(self._writers):
            self._try(writer, partial(writer.add, step, values))

    def _try(self, writer: ValueWriter, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001  the training must go on
            self._leave_out(writer, error)

    def _leave_out(self, writer: ValueWriter, error: Exception) -> None:
        self._writers.remove(writer)
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(
            f"mindspeed-precision: warning: {type(writer).__name__} failed and is left out from now on: "
            f"{reason}; mindspeed-precision export RUN makes it up\n"
        )

    def close(self) -> None:
        """Write what waits."""
        for writer in list(self._writers):
            self._try(writer, writer.close)


__all__ = ["LiveExport", "open_live", "rank_name"]
