"""Draws docs/figures/*.svg: error growth of healthy pairs by depth and by step, with the bounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from tolerance import METRIC, Sample, measured
from tolerance_runs import groups

from mindspeed_precision.compare.calibration import AFTER_UPDATES, FACTOR
from mindspeed_precision.compare.depth import numbered
from mindspeed_precision.records import Phase, RecordKey, Role

NAMES = {"f": "float32", "b": "bfloat16"}
SERIES = (
    ("healthy pair (TP2 against TP1): the record closest to its bound", "tab:blue", "-"),
    ("one rounding of noise in the parameters", "tab:green", "-"),
    (
        f"calibrated bound ({FACTOR:g} times that, behind an update up to {FACTOR * AFTER_UPDATES:g})",
        "tab:green",
        "--",
    ),
    ("bound of cross_layout", "tab:red", "--"),
)

Place = Callable[[RecordKey], float | None]


def draw(folder: Path, out: Path) -> int:
    """Train what is not there, measure, and write the figures into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "1", "font.size": 9})
    directions = (("outputs of layers", _forward), ("dW of linears", _backward))
    found = _measured(folder, "depth", directions)
    _figure(out / "depth.svg", found, directions, "layer", "step 0, 48 layers, hidden size 32")
    kinds = (("reduced gradients", _step_of(Role.REDUCED_GRAD)), ("exp_avg", _step_of(Role.EXP_AVG)))
    found = _measured(folder, "steps", kinds)
    _figure(out / "steps.svg", found, kinds, "step", "20 steps at lr = 1e-3, 2 layers, hidden size 64")
    return 0


def _measured(folder: Path, name: str, panels: Iterable[tuple[str, Place]]) -> dict[str, list[Sample]]:
    """Return the relative errors of a measurement by the first letter of its models."""
    places = [place for _, place in panels]

    def wanted(key: RecordKey) -> bool:
        return any(place(key) is not None for place in places)

    return {
        group.name[0]: [
            one for own in measured(folder, group, wanted).values() for one in own if one.metric == METRIC
        ]
        for group in groups(name)
    }


def _forward(key: RecordKey) -> float | None:
    whole = key.phase is Phase.FPROP and key.role is Role.OUTPUT and key.step == 0
    found = numbered(key.fqn)
    return float(found[1]) if whole and found and key.fqn == f"{found[0]}.{found[1]}" else None


def _backward(key: RecordKey) -> float | None:
    whole = key.phase is Phase.WGRAD and key.role is Role.WGRAD and key.step == 0
    found = numbered(key.fqn)
    return float(found[1]) if whole and found and key.fqn.endswith("weight") and "linear" in key.fqn else None


def _step_of(role: Role) -> Place:
    return lambda key: float(key.step) if key.role is role and key.step >= 0 else None


def _figure(
    path: Path, found: dict[str, list[Sample]], panels: Iterable[tuple[str, Place]], axis: str, title: str
) -> None:
    panels = list(panels)
    figure, grid = pyplot.subplots(2, len(panels), figsize=(9, 6), sharex="col", squeeze=False)
    for row, letter in zip(grid, NAMES, strict=True):
        for panel, (name, place) in zip(row, panels, strict=True):
            _panel(panel, found[letter], place)
            panel.set_title(f"{NAMES[letter]}, {name}", fontsize=9)
            panel.grid(alpha=0.3, which="major")
    for panel in grid[-1]:
        panel.set_xlabel(axis)
    for row in grid:
        row[0].set_ylabel("relative L2 error")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _panel(panel: Any, found: Iterable[Sample], place: Place) -> None:
    """Draw value, reference and bounds of one record at each place: the one that is closest to its bound."""
    at: dict[float, list[Sample]] = defaultdict(list)
    for sample in found:
        where = place(sample.key)
        if where is not None and sample.value:
            at[where].append(sample)
    places = sorted(at)
    closest = [max(at[p], key=lambda sample: sample.value / sample.allowed) for p in places]
    lines = (
        [one.value for one in closest],
        [one.reference for one in closest],
        [one.allowed for one in closest],
        [one.bound for one in closest],
    )
    for (label, colour, style), values in zip(SERIES, lines, strict=True):
        panel.plot(places, values, style, color=colour, label=label, linewidth=1.4)
    panel.set_yscale("log")
