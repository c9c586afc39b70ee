"""Whether two runs are folded: whether memory holds them, and whether ranks may stand for others at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_precision.align.lanes import settings_differ
from mindspeed_precision.dump.attempts import attempt_directories
from mindspeed_precision.dump.format import INDEX, MANIFEST
from mindspeed_precision.dump.reader import Run, load_manifest
from mindspeed_precision.engines import Resources

PER_BYTE = 4.0
"""Bytes of memory for each byte of an index, where every record is an object: 3.3 were measured."""

BYTES_PER_RECORD = 430
"""Bytes of a record's line: measured (docs/scale.md)."""

LAYOUTS_DIFFER = "their parallel layouts differ"
"""Why runs are not folded whose shards are put together from many ranks."""


def needs_folding(paths: Sequence[Path], resources: Resources) -> bool:
    """Tell whether two runs are larger than memory may be; False for what is no run of ours."""
    if not all((path / MANIFEST).is_file() for path in paths):
        return False
    return sum(map(index_bytes, paths)) * PER_BYTE > resources.memory


def index_bytes(path: Path) -> int:
    """Return how many bytes the indices of a run's ranks have, restarts aside."""
    return sum(index.stat().st_size for index in path.glob(f"rank*/{INDEX}") if index.is_file())


def why_not(paths: Sequence[Path]) -> str:
    """Say why two runs cannot be folded; empty where they can: as far as their manifests tell."""
    one, two = (load_manifest(path) for path in paths)
    if any(attempt_directories(path) for path in paths):
        return "one was restarted"
    if _framework(one) != _framework(two):
        return "two frameworks computed them"
    if any(manifest.get("reference") is not None for manifest in (one, two)):
        return "one took its state from the other"
    if one.get("first_step") != two.get("first_step"):
        return "they begin at different steps"
    if one.get("parallel") != two.get("parallel") or settings_differ(*map(of_manifest, paths, (one, two))):
        return LAYOUTS_DIFFER
    return ""


def of_manifest(path: Path, manifest: dict[str, Any]) -> Run:
    """Return a run of which nothing but its manifest was read."""
    return Run(path=path, manifest=manifest, ranks={})


def _framework(manifest: Mapping[str, object]) -> object:
    found = manifest.get("framework")
    return found.get("name") if isinstance(found, dict) else None
