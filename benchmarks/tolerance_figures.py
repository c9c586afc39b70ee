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

from mindspeed_precision.compare.calibration import FACTOR
from mindspeed_precision.compare.depth import numbered
from mindspeed_precision.records import Phase, Role

NAMES = {"f": "float32", "b": "bfloat16"}
SERIES = (
    ("healthy pair (TP2 against TP1), worst", "tab:blue", "-"),
    ("one rounding of noise in the parameters", "tab:green", "-"),
    (f"calibrated bound ({FACTOR:g} times that)", "tab:green", "--"),
    ("bound of cross_layout", "tab:red", "--"),
)

Place = Callable[[Sample], float | None]


def draw(folder: Path, out: Path) -> int:
    """Train what is not there, measure, and write the figures into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "1", "font.size": 9})
    deep = {group.name[0]: _all(folder, group) for group in groups("depth")}
    directions = (("forward: outputs of layers", _forward), ("backward: dW of layers", _backward))
    _figure(out / "depth.svg", deep, directions, "layer", "step 0, 48 layers, hidden size 32")
    long = {group.name[0]: _all(folder, group) for group in groups("steps")}
    kinds = (("reduced gradients", _step_of(Role.REDUCED_GRAD)), ("exp_avg", _step_of(Role.EXP_AVG)))
    _figure(out / "steps.svg", long, kinds, "step", "20 steps at lr = 1e-3, 2 layers, hidden size 64")
    return 0


def _all(folder: Path, group: Any) -> list[Sample]:
    return [one for found in measured(folder, group).values() for one in found if one.metric == METRIC]


def _forward(sample: Sample) -> float | None:
    key = sample.key
    whole = key.phase is Phase.FPROP and key.role is Role.OUTPUT and key.step == 0
    found = numbered(key.fqn)
    return float(found[1]) if whole and found and key.fqn.count(".") == 2 else None


def _backward(sample: Sample) -> float | None:
    key, found = sample.key, numbered(sample.key.fqn)
    whole = key.phase is Phase.WGRAD and key.role is Role.WGRAD and key.step == 0
    return float(found[1]) if whole and found and key.fqn.endswith("weight") else None


def _step_of(role: Role) -> Place:
    return lambda sample: float(sample.key.step) if sample.key.role is role else None


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
    figure.savefig(path.with_suffix(".png"), dpi=80) if path.parent.name == "check" else None
    pyplot.close(figure)


def _panel(panel: Any, found: Iterable[Sample], place: Place) -> None:
    """Draw the worst value, reference and bounds at each place; records that agree have no value."""
    at: dict[float, list[Sample]] = defaultdict(list)
    for sample in found:
        where = place(sample)
        if where is not None and sample.value:
            at[where].append(sample)
    places = sorted(at)
    lines = (
        [max(s.value for s in at[p]) for p in places],
        [max(s.reference for s in at[p]) for p in places],
        [min(max(FACTOR * s.reference, FACTOR * s.floor) for s in at[p]) for p in places],
        [min(s.bound for s in at[p]) for p in places],
    )
    for (label, colour, style), values in zip(SERIES, lines, strict=True):
        panel.plot(places, values, style, color=colour, label=label, linewidth=1.4)
    panel.set_yscale("log")
