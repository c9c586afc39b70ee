"""Which format a checkpoint has, by what is there, and its reader."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_precision.ckpt.megatron_torch import read_megatron_torch
from mindspeed_precision.ckpt.mindspore_file import read_mindspore
from mindspeed_precision.ckpt.recorded import read_run
from mindspeed_precision.ckpt.safetensors_files import read_directory, read_safetensors, read_torch_file
from mindspeed_precision.ckpt.stored import Checkpoint
from mindspeed_precision.ckpt.torch_dist import METADATA, read_torch_dist
from mindspeed_precision.dump.object_store import is_url, local_directory, shown
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.torch_archive.archive import MAGIC
from mindspeed_precision.torch_archive.mapped import MappedFile, require_inside

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"\d{1,9}|release")
_EXPECTED = (
    "a run directory, a checkpoint of Megatron (torch, torch_dist), a directory of Hugging Face or of "
    "safetensors, or a file: torch.save, safetensors, MindSpore's .ckpt"
)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read what a path leads to; elements are read when they are compared.

    Raises:
        CheckpointError: there is nothing there, or nothing that is known here, or it is damaged.
        DumpError: it is a run directory that cannot be read.
    """
    where, given = Path(path), str(path)
    if is_url(path):
        return read_run(local_directory(path), shown(given))
    try:
        if where.is_dir():
            return _of_directory(where, given)
        if where.is_file():
            return _of_file(where, given)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=given) from error
    raise CheckpointError("no such checkpoint", where=given, expected=_EXPECTED)


def _of_file(path: Path, given: str) -> Checkpoint:
    if path.name.endswith(".index.json"):
        return _of_directory(path.parent, given)
    file = MappedFile(path)
    if file.bytes(0, min(4, file.size)) == MAGIC:
        return read_torch_file(path, given)
    if path.suffix == ".safetensors":
        return read_safetensors(path, given)
    if file.bytes(0, min(2, file.size)) == b"\x80\x02" and path.suffix != ".ckpt":
        raise CheckpointError(
            "written by torch.save of before 1.6",
            where=given,
            expected="an archive",
            remedy="load it with torch and save it again",
        )
    return read_mindspore(path, given)


def _of_directory(path: Path, given: str) -> Checkpoint:
    if (path / "run.json").is_file():
        return read_run(path, given)
    if (path / TRACKER).is_file():
        return _of_directory(_latest(path), given)
    if (path / METADATA).is_file():
        return read_torch_dist(path, given)
    if any(path.glob("mp_rank_*")):
        return read_megatron_torch(path, given)
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return read_directory(path, given)
    files = sorted(path.glob("*.ckpt"))
    if len(files) == 1:
        return read_mindspore(require_inside(path, files[0]), given)
    found = ", ".join(sorted(one.name for one in path.iterdir())[:6]) or "an empty directory"
    hint = (
        "merge the ranks' files first (mindspore.transform_checkpoints)" if any(path.glob("rank_*")) else ""
    )
    raise CheckpointError(
        "no checkpoint that is known here", where=given, found=found, expected=_EXPECTED, remedy=hint
    )


def _latest(path: Path) -> Path:
    tracker = MappedFile(require_inside(path, path / TRACKER))
    text = tracker.bytes(0, min(32, tracker.size)).decode("ascii", "replace").strip()
    if not _ITERATION.fullmatch(text):
        raise CheckpointError(
            "no iteration", where=str(path / TRACKER), found=repr(text), expected="a number, or release"
        )
    found = path / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise CheckpointError("the latest checkpoint is not there", where=str(found), expected="a directory")
    return require_inside(path, found)


__all__ = ["open_checkpoint"]
