"""Results of an evaluation: lm-eval-harness, plain JSON, CSV, ``name: value`` lines, Megatron's log."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import ConfigError

Key = tuple[str, str]
"""Task and metric."""

MOST_BYTES = 64 << 20
"""Largest file that is read: results are small, and what is larger is something else."""

_TASK = ("task", "tasks", "subject", "dataset", "benchmark", "name")
_STDERR = ("stderr", "std_err", "standard_error", "stderr_value")
_COUNT = ("n", "question_n", "samples", "num_samples", "count")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
_LINE = re.compile(
    rf"^\s*(?P<name>[^:=|]+?)\s*[:=]\s*(?P<value>{_NUMBER})\s*(?P<percent>%?)"
    rf"(?:\s*(?:±|\+/-)\s*(?P<stderr>{_NUMBER})\s*%?)?\s*$",
    re.IGNORECASE,
)
_VALIDATION = re.compile(r"(?P<split>validation|test) loss at (?P<where>[^|]+?)\s*\|(?P<rest>.*)$")
_ENTRY = re.compile(rf"(?P<name>[^|]+?) (?P<kind>value|PPL): (?P<value>{_NUMBER})\s*\|?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task.

    Attributes:
        value: as it was written.
        stderr: its standard error; None: not given.
        derived: the standard error was derived from a share and the number of questions, not given.
    """

    value: float
    stderr: float | None = None
    derived: bool = False


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a file says.

    Attributes:
        path: of the file.
        kind: what it was read as.
        scores: by task and metric.
        left_out: what in it is no score, in words.
    """

    path: Path
    kind: str
    scores: Mapping[Key, Score]
    left_out: tuple[str, ...] = ()


def read_results(path: str | Path) -> Results:
    """Read a file of results.

    Raises:
        ConfigError: it cannot be read, or holds no score.
    """
    path = Path(path)
    text = _text(path)
    readers: dict[str, Callable[[str, Path], tuple[str, Iterator[tuple[Key, Score]], list[str]]]] = {
        ".json": _json,
        ".csv": _csv,
    }
    kind, scores, left_out = readers.get(path.suffix.lower(), _lines)(text, path)
    found: dict[Key, Score] = {}
    for key, score in scores:
        if key in found and found[key] != score:
            raise ConfigError(
                "one metric of one task is there twice, with two values",
                where=f"{path}: {' '.join(filter(None, key))}",
                found=f"{found[key].value:g} and {score.value:g}",
                expected="one evaluation in a file",
            )
        found[key] = score
    if not found:
        raise ConfigError(
            "no score in this file",
            where=str(path),
            found=kind,
            expected="lm-eval-harness's results.json, JSON {task: value}, CSV with a task column, "
            "name: value lines, or Megatron's log with validation losses",
        )
    return Results(path=path, kind=kind, scores=found, left_out=tuple(left_out))


def _text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(
            "a directory, no file of results",
            where=str(path),
            remedy="runs hold no evaluation: give the log of the training, which has its validation losses",
        )
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(
                "too large for a file of results",
                where=str(path),
                found=f"{path.stat().st_size} bytes",
                expected=f"at most {MOST_BYTES}",
            )
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError("cannot be read", where=str(path), found=str(found), expected="a file") from error


def _json(text: str, path: Path) -> tuple[str, Iterator[tuple[Key, Score]], list[str]]:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "not readable as JSON", where=str(path), found=" ".join(str(error).split())[:120]
        ) from error
    if not isinstance(plain, dict):
        raise ConfigError("not an object", where=str(path), found=type(plain).__name__, expected="{task: …}")
    if isinstance(plain.get("results"), dict):
        return "lm-eval-harness JSON", iter(list(_harness(plain["results"]))), []
    left_out: list[str] = []
    return "JSON", iter(list(_plain(plain, left_out))), left_out


def _harness(tasks: Mapping[str, Any]) -> Iterator[tuple[Key, Score]]:
    """Yield the scores of ``results``: ``{task: {"acc,none": …, "acc_stderr,none": …, "alias": …}}``."""
    for task, metrics in tasks.items():
        if not isinstance(metrics, dict):
            continue
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if not _is_number(value) or metric.endswith("_stderr") or metric in _COUNT:
                continue
            stderr = metrics.get(f"{metric}_stderr" + (f",{filtered}" if filtered else ""))
            shown = metric if filtered in ("", "none") else f"{metric} ({filtered})"
            yield (task, shown), Score(value=float(value), stderr=_positive(stderr))


def _plain(plain: Mapping[str, Any], left_out: list[str]) -> Iterator[tuple[Key, Score]]:
    for task, value in plain.items():
        if _is_number(value):
            yield (task, ""), Score(value=float(value))
        elif isinstance(value, dict):
            yield from _metrics(task, value)
        else:
            left_out.append(f"{task}: {type(value).__name__}")


def _metrics(task: str, metrics: Mapping[str, Any]) -> Iterator[tuple[Key, Score]]:
    numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
    count = next((numbers[name] for name in _COUNT if name in numbers), None)
    scores = [
        name
        for name in numbers
        if name not in _COUNT and name not in _STDERR and not name.endswith("_stderr")
    ]
    for name in scores:
        given = numbers.get(f"{name}_stderr")
        if given is None and len(scores) == 1:
            given = next((numbers[alias] for alias in _STDERR if alias in numbers), None)
        yield (task, name), _score(numbers[name], given, count)


def _score(value: float, stderr: float | None, count: float | None) -> Score:
    """Return a score; the standard error of a share of ``count`` questions is that of a binomial."""
    if stderr is None and count is not None and count > 1 and 0 <= value <= 1:
        return Score(value=value, stderr=math.sqrt(value * (1 - value) / (count - 1)), derived=True)
    return Score(value=value, stderr=_positive(stderr))


def _csv(text: str, path: Path) -> tuple[str, Iterator[tuple[Key, Score]], list[str]]:
    rows = list(csv.DictReader(io.StringIO(text)))
    columns = list(rows[0]) if rows else []
    by_name = {str(name).strip().lower(): name for name in columns if name}
    task = next((by_name[name] for name in _TASK if name in by_name), None)
    if task is None:
        raise ConfigError(
            "no column names the task",
            where=str(path),
            found=", ".join(str(name) for name in columns) or "no row",
            expected=f"one of {', '.join(_TASK)}",
        )
    left_out: list[str] = []
    return "CSV", iter([pair for row in rows for pair in _row(row, task, by_name, left_out)]), left_out


def _row(
    row: Mapping[str, str], task: str, by_name: Mapping[str, str], left_out: list[str]
) -> Iterator[tuple[Key, Score]]:
    name = (row.get(task) or "").strip()
    cells = {title: _parsed(row.get(column)) for title, column in by_name.items() if column != task}
    numbers = {title: value for title, value in cells.items() if value is not None}
    metric = (row.get(by_name.get("metric", "")) or "").strip()
    if metric and "value" in numbers:
        found = {metric: numbers["value"]}
        found |= {title: numbers[title] for title in (*_STDERR, *_COUNT) if title in numbers}
    else:
        found = {title: value for title, value in numbers.items() if title != "version"}
    if not found:
        left_out.append(f"row {name or '(without a task)'}: no number")
    yield from _metrics(name, found)


def _parsed(cell: object) -> float | None:
    if not isinstance(cell, str) or not re.fullmatch(_NUMBER, cell.strip(), re.IGNORECASE):
        return None
    return float(cell)


def _lines(text: str, path: Path) -> tuple[str, Iterator[tuple[Key, Score]], list[str]]:
    lines = text.splitlines()
    log = [pair for line in lines for pair in _validation(line)]
    if log:
        return "Megatron's log", iter(log), []
    found, left_out = [], []
    for line in filter(str.strip, lines):
        match = _LINE.match(line)
        if match is None:
            left_out.append(f"line {line.strip()[:60]!r}")
            continue
        stderr = match["stderr"]
        score = Score(
            value=float(match["value"]), stderr=None if stderr is None else _positive(float(stderr))
        )
        found.append(((match["name"], "%" if match["percent"] else ""), score))
    return "name: value lines", iter(found), left_out


def _validation(line: str) -> Iterator[tuple[Key, Score]]:
    """Yield the losses of a line ``validation loss at iteration 1000 | lm loss value: 5.1E+00 | …``."""
    match = _VALIDATION.search(line)
    if match is None:
        return
    for entry in _ENTRY.finditer(match["rest"]):
        name = entry["name"].strip() + (" PPL" if entry["kind"].upper() == "PPL" else "")
        where = " ".join(match["where"].split())
        yield (f"{match['split']} loss at {where}", name), Score(value=float(entry["value"]))


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max  # a whole number of JSON may have any size
    return isinstance(value, float)


def _positive(value: Any) -> float | None:
    return float(value) if _is_number(value) and math.isfinite(value) and value > 0 else None


__all__ = ["Key", "Results", "Score", "read_results"]
