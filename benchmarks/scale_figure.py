"""The figure of docs/scale.md: what was measured, and the lines that were fitted to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VARIED = {"ranks": "ranks", "steps": "steps", "records": "records a step and rank"}
"""What grows, by the name of its field, in words."""

MEASURED = {"cpu_seconds": ("processor seconds", "s"), "memory_mib": ("peak memory, MiB", "MiB")}
"""What is measured, by the name of its field: in words, and its unit."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """``constant + slope × x``, by least squares.

    Attributes:
        constant: at 0.
        slope: for each.
        off: largest distance of a measured point.
    """

    constant: float
    slope: float
    off: float

    def describe(self, unit: str, each: str) -> str:
        """Write it with its numbers."""
        sign = "-" if self.slope < 0 else "+"
        return f"{self.constant:.1f} {unit} {sign} {abs(self.slope):.3g} {unit} for each of the {each}"


def line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fit a line to at least two points."""
    slope, constant = np.polyfit(x, y, 1)
    off = float(np.abs(constant + slope * np.asarray(x) - np.asarray(y)).max())
    return Line(constant=float(constant), slope=float(slope), off=off)


def draw(found: Mapping[str, Sequence[object]], path: Path) -> None:
    """Draw time and memory over ranks, steps and records.

    Args:
        found: by what was varied, the costs (``scale.Cost``), the smallest run first.
        path: an SVG file.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "scale"  # the same numbers are the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(len(MEASURED), len(found), figsize=(10, 5.6), sharey="row", squeeze=False)
    for row, (field, (words, unit)) in zip(grid, MEASURED.items(), strict=True):
        for axis, (name, costs) in zip(row, found.items(), strict=True):
            x, y = ([float(getattr(cost, which)) for cost in costs] for which in (name, field))
            fit = line(x, y)
            axis.plot(x, y, "o", color="#1f5f8b", label="measured")
            ends = np.array([0.0, max(x)])
            axis.plot(
                ends, fit.constant + fit.slope * ends, "-", color="#c2571a", linewidth=1.2, label="fitted"
            )
            axis.set_title(f"{fit.constant:.3g} {unit} + {fit.slope:.3g} {unit} × {name}", fontsize=9)
            axis.set_xlabel(VARIED[name], fontsize=9)
            axis.set_xlim(left=0)
            axis.tick_params(labelsize=8)
            axis.grid(visible=True, linewidth=0.4, alpha=0.5)
        row[0].set_ylabel(words, fontsize=9)
        row[0].set_ylim(bottom=0)  # of all that share it, once all is drawn
    grid[0][0].legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
