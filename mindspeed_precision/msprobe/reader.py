"""A dump of msprobe, read as a run: what it says becomes records, what it lacks stays absent and is said.

It is read into memory, as it is: no copy in our own format is made, which could not say that a fingerprint
is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_precision.dump.collection import no_collection
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.msprobe.calls import Construct
from mindspeed_precision.msprobe.entries import StepEntries
from mindspeed_precision.msprobe.files import CONSTRUCT, DUMP, ELEMENTS, WRITTEN_BY, Place, places, read_json
from mindspeed_precision.msprobe.rank_records import DumpedRank, Step, rank_of
from mindspeed_precision.records import INIT_STEP

TOOL = "msprobe"
"""What ``recorded_by`` in the manifest of such a run says."""

_FRAMEWORKS: Mapping[str, tuple[str, str]] = {
    "pytorch": ("torch", "torch"),
    "mindspore": ("mindspore", "mindspore"),
    "mindtorch": ("mindspore", "torch"),
}
"""What computes, and the API that the program used, by msprobe's name."""


def load_dump(path: str | Path) -> Run:
    """Read a dump of msprobe: its directory, one of its steps or ranks, or a ``dump.json``.

    Raises:
        DumpError: there is no dump, or no step of it can be read.
    """
    root = Path(path)
    by_rank: dict[int, list[Place]] = defaultdict(list)
    for place in places(root):
        by_rank[place.rank].append(place)
    ranks: dict[int, DumpedRank] = {}
    notes: list[str] = []
    failures: list[DumpError] = []
    framework = ""
    for rank, of_rank in sorted(by_rank.items()):
        steps, lost = _steps(of_rank)
        failures += lost
        notes += [f"rank {rank}: left out: {error}" for error in lost]
        if steps:
            ranks[rank] = rank_of(rank, len(by_rank), of_rank[0].directory, steps)
            framework = framework or steps[0].entries.framework
            notes += [f"rank {rank}: {note}" for note in ranks[rank].notes]
    if not ranks:
        raise failures[0]
    return Run(
        path=root, manifest=_manifest(framework, list(ranks.values())), ranks={**ranks}, notes=tuple(notes)
    )


def _steps(of_rank: Sequence[Place]) -> tuple[list[Step], list[DumpError]]:
    """Return the steps of a rank that can be read, and why the others cannot."""
    steps: list[Step] = []
    lost: list[DumpError] = []
    with no_collection():
        for place in of_rank:
            found = _step_or_error(place)
            if isinstance(found, DumpError):
                lost.append(found)
            else:
                steps.append(found)
    return steps, lost


def _step_or_error(place: Place) -> Step | DumpError:
    try:
        return _step(place)
    except DumpError as error:
        return error


def _step(place: Place) -> Step:
    file = place.directory / DUMP
    head = read_json(file)
    data, framework = head.pop("data", None), head.get("framework")
    if not isinstance(data, dict):
        found = type(data).__name__
        raise DumpError("no entries", where=str(file), found=found, expected="an object under data")
    if not isinstance(framework, str) or framework not in _FRAMEWORKS:
        expected = " or ".join(_FRAMEWORKS)
        raise DumpError("another framework", where=str(file), found=str(framework)[:60], expected=expected)
    construct = place.directory / CONSTRUCT
    inside = Construct.of(read_json(construct)) if construct.exists() else Construct()
    entries = StepEntries(
        step=place.step,
        framework=framework,
        data=data,
        construct=inside,
        exported=head.get("written_by") == WRITTEN_BY,
    )
    level, task = (str(head.get(name, "unknown"))[:20] for name in ("level", "task"))
    return Step(level=level, task=task, entries=entries, directory=place.directory / ELEMENTS)


def _manifest(framework: str, ranks: Sequence[DumpedRank]) -> dict[str, Any]:
    name, api = _FRAMEWORKS[framework]
    manifest: dict[str, Any] = {
        "framework": {"name": name, "version": "", "api": api},
        "recorded_by": TOOL,
    }
    if any(INIT_STEP in rank.steps for rank in ranks):
        manifest["first_step"] = 0
    return manifest


def is_dump(run: Run) -> bool:
    """Tell whether a run was read from a dump of msprobe."""
    return run.manifest.get("recorded_by") == TOOL
