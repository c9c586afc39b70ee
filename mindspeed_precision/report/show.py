"""Look inside one run: its records as a table, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import INIT_STEP, NO_MICROBATCH, Role, TensorRecord
from mindspeed_precision.report.visible import one_line

_WIDEST = 120
"""Characters of a cell; JSON has all of them."""

_TITLES = ("step", "mb", "rank", "phase", "fqn", "role", "shape", "dtype", "layout", "norm", "fingerprint")


Shown = Sequence[tuple[int, TensorRecord]]
"""Records, each with its rank."""


@dataclass
class Asked:
    """Which records of a run are shown; counts those that it is asked about, so that no others need be kept.

    Attributes:
        fqn: shell pattern.
        role: name of a role, or ``*``.
        step: 0-based; ``INIT_STEP`` for what was before the first; None for all.
        seen: how many records it was asked about.

    Raises:
        ConfigError: there is no such role.
    """

    fqn: str = "*"
    role: str = "*"
    step: int | None = None
    seen: int = 0

    def __post_init__(self) -> None:
        known = [r.value for r in Role]
        if self.role != "*" and self.role not in known:
            expected = f"one of {', '.join(known)}"
            raise ConfigError("no such role", where="--role", found=self.role, expected=expected)

    @property
    def all(self) -> bool:
        """Whether every record is."""
        return (self.fqn, self.role, self.step) == ("*", "*", None)

    def __call__(self, record: TensorRecord) -> bool:
        """Tell whether a record is shown."""
        self.seen += 1
        of_name = fnmatchcase(record.key.fqn, self.fqn) and self.role in ("*", record.key.role.value)
        return of_name and self.step in (None, record.key.step)

    def shown(self, run: Run) -> Shown:
        """Return what is shown of a run that was read with this, by rank, in execution order.

        Raises:
            ConfigError: nothing fits.
        """
        found = [(number, record) for number, rank in run.ranks.items() for record in rank.records]
        if not found:
            raise ConfigError(
                f"none of the run's {count(self.seen, 'record')} fits",
                where=str(run.path),
                remedy="see --fqn, --role and --step",
            )
        return found


def show_text(run: Run, records: Shown) -> str:
    """Return a line per record, below a line about the run."""
    rows = [_TITLES] + [
        tuple(one_line(cell, _WIDEST) for cell in _cells(rank, record)) for rank, record in records
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    lines = [_about(run)]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _about(run: Run) -> str:
    framework = run.manifest.get("framework")
    name = (
        f"{framework.get('name')} {framework.get('version')}"
        if isinstance(framework, dict)
        else "unknown framework"
    ).strip()
    tool = run.manifest.get("recorded_by")
    name += f", dumped by {tool}" if tool else ""
    steps = sorted({step for rank in run.ranks.values() for step in rank.steps if step != INIT_STEP})
    about = f"{run.path}: {name}, {count(len(run.ranks), 'rank')}, {count(len(steps), 'step')}"
    return "\n".join(map(one_line, [about, *(f"  note: {note}" for note in run.notes)]))


def _cells(rank: int, record: TensorRecord) -> tuple[str, ...]:
    key, statistics = record.key, record.digest.statistics
    slot = f"[{key.slot}]" if key.slot else ""
    layout = (
        ""
        if record.layout is None
        else ("contiguous" if record.layout.contiguous else str(record.layout.stride))
    )
    value = record.value
    norm = "-" if statistics is None else f"{statistics.l2_norm if value is None else value:.6g}"
    return (
        "init" if key.step == INIT_STEP else str(key.step),
        "-" if key.microbatch == NO_MICROBATCH else str(key.microbatch),
        str(rank),
        key.phase.value,
        key.fqn or "(model)",
        f"{key.role.value}{slot}" + (" recomputed" if key.recomputed else ""),
        "x".join(map(str, record.shape)) or "scalar",
        record.dtype,
        layout,
        norm,
        f"{record.digest.fingerprint:016x}" if record.digest.exact else "-",
    )


def show_json(records: Shown) -> str:
    """Return the records as a JSON list."""
    return json.dumps([_plain(rank, record) for rank, record in records], indent=1) + "\n"


def _plain(rank: int, record: TensorRecord) -> dict[str, Any]:
    key, statistics = record.key, record.digest.statistics
    return {
        "rank": rank,
        "seq": record.seq,
        "step": key.step,
        "microbatch": key.microbatch,
        "phase": key.phase.value,
        "fqn": key.fqn,
        "role": key.role.value,
        "slot": key.slot,
        "occurrence": key.occurrence,
        "recomputed": key.recomputed,
        "shape": list(record.shape),
        "dtype": record.dtype,
        "stride": None if record.layout is None else list(record.layout.stride),
        "fingerprint": f"{record.digest.fingerprint:016x}" if record.digest.exact else None,
        "l2_norm": None if statistics is None else statistics.l2_norm,
        "payload": record.payload,
    }
