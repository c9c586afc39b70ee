"""Where the numbers go: event files by tensorboard's own writer, runs by wandb's own client."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mindspeed_precision.errors import DumpError, PrecisionError
from mindspeed_precision.permissions import make_directory


class ValueWriter(Protocol):
    """Takes the numbers of a step."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step."""
        ...

    def close(self) -> None:
        """Write what waits."""
        ...


class TensorBoardWriter:
    """Event files in a directory of their own. Needs the package ``tensorboard`` alone, no framework.

    Args:
        directory: new, or without event files: TensorBoard would draw two runs as one.

    Raises:
        PrecisionError: the package is not installed.
        DumpError: the directory has event files, or cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        require("tensorboard", extra="tensorboard")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        taken = next(directory.glob("events.out.tfevents.*"), None) if directory.is_dir() else None
        if taken is not None:
            raise DumpError(
                "there are event files already, and two runs in one directory are drawn as one",
                where=str(directory),
                found=taken.name,
                expected="a new directory",
                remedy="remove them, or export to another directory",
            )
        try:
            make_directory(directory, exist_ok=True)
        except OSError as error:
            raise DumpError(f"cannot write: {error.strerror}", where=str(directory)) from error
        self.directory = directory
        self._writer = EventFileWriter(str(directory))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases; offline, unless the environment says ``WANDB_MODE=online``.

    Args:
        project: its name.
        run: name of the run.
        group: runs that belong together: the ranks of one training.
        configuration: shown beside the run.

    Raises:
        PrecisionError: the package is not installed.
    """

    def __init__(self, project: str, *, run: str, group: str, configuration: Mapping[str, Any]) -> None:
        require("wandb", extra="wandb")
        import wandb

        self._run = wandb.init(
            project=project,
            name=run,
            group=group,
            config=dict(configuration),
            mode=_mode(),
            reinit="create_new",  # a training may have a run of its own
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        self.directory = Path(self._run.dir).parent

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run; its file is whole when the service that writes it ends (``end_service``)."""
        self._run.finish()

    @staticmethod
    def end_service() -> None:
        """Wait for wandb's own process to write all and to end; ends every run of this process."""
        import wandb

        wandb.teardown()


def _mode() -> Any:
    return os.environ.get("WANDB_MODE") or "offline"


def require(package: str, *, extra: str) -> None:
    """Say how to install an optional package.

    Raises:
        PrecisionError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise PrecisionError(
            f"{package} is not installed",
            where=f"export to {package}",
            remedy=f"pip install 'mindspeed-precision[{extra}]'",
        )


__all__ = ["TensorBoardWriter", "ValueWriter", "WandbWriter", "require"]
