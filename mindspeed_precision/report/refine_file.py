"""The settings of a second pass as a file, and what is said of it."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_precision.counting import count
from mindspeed_precision.errors import ConfigError, DumpError
from mindspeed_precision.permissions import open_new
from mindspeed_precision.records import INIT_STEP, Diagnosis, Refinement, Side, Verdict
from mindspeed_precision.report.phrases import byte_count

NAME = "refine.yaml"


def refine_text(refinement: Refinement, *, baseline: str, candidate: str) -> str:
    """Return the content of the file: settings as YAML, whose values are JSON.

    Args:
        refinement: the second pass.
        baseline: the first run of that side, for the reader.
        candidate: likewise.
    """
    comment = [
        f"# A second, short pass over {baseline} and {candidate}:",
        f"# stops after step {refinement.stop_after} and keeps the elements of "
        f"{_elements(refinement)}. Give it to both:",
        "#   --precision-debug-config FILE",
        "# `refines` holds bits of the first runs: the comparison checks that the second ones have them.",
    ]
    return "\n".join([*comment, *_lines(refinement.settings)]) + "\n"


def _lines(plain: Mapping[str, Any], margin: str = "") -> Iterator[str]:
    for name, value in plain.items():
        if isinstance(value, dict) and value:
            yield f"{margin}{name}:"
            yield from _lines(value, f"{margin}  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict | list):
            yield f"{margin}{name}:"
            yield from (f"{margin}  - {json.dumps(entry)}" for entry in value)
        else:
            yield f"{margin}{name}: {json.dumps(value)}"


def require_new(path: Path) -> None:
    """Refuse a place where the file cannot be written, or would overwrite one, before anything is compared.

    Raises:
        ConfigError: it exists, or its directory does not, or may not be written.
    """
    if path.exists():
        raise ConfigError(
            "the file exists; it is not overwritten", where="--refine", found=str(path), expected="a new file"
        )
    if not path.parent.is_dir():
        raise ConfigError("no such directory", where="--refine", found=str(path.parent))
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("the directory cannot be written", where="--refine", found=str(path.parent))


def write_refine_file(
    refinement: Refinement, path: Path, *, baseline: str, candidate: str, new: bool
) -> None:
    """Write the file.

    Args:
        refinement: the second pass.
        path: of the file.
        baseline: see ``refine_text``.
        candidate: likewise.
        new: it must not exist yet.

    Raises:
        DumpError: it exists, or cannot be written.
    """
    text = refine_text(refinement, baseline=baseline, candidate=candidate)
    try:
        with open_new(path, "x" if new else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise DumpError(f"cannot write the settings: {error.strerror}", where=str(path)) from error


def nothing_to_refine(diagnosis: Diagnosis) -> str:
    """Say why there is no second pass for a diagnosis without a refinement."""
    first = diagnosis.first_divergence
    if diagnosis.status in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE):
        return "nothing to refine: the runs agree"
    if first is None:
        return "nothing to refine: no record diverges"
    if first.key.step == INIT_STEP:
        return (
            "nothing to refine: the runs differ before the first step, in their initial parameters; "
            "give both one start (a checkpoint, or init_from)"
        )
    return "nothing to refine: both runs kept the elements of the divergent window"


def next_lines(refinement: Refinement, diagnosis: Diagnosis, config: str) -> list[str]:
    """Return what to run next: a sentence, then commands, indented.

    Args:
        refinement: the second pass.
        diagnosis: the answer.
        config: path of the refine file.
    """
    again, out = _new_places(diagnosis)
    return [
        f"two short runs to step {refinement.stop_after} keep the elements of {_elements(refinement)} "
        f"(with all else {byte_count(refinement.bytes)}). The first commands, their --precision-debug flags "
        "replaced by:",
        *(f"  {_flags(refinement, side, config, again[side])}" for side in Side),
        "and then:",
        f"  {shlex.join(['mindspeed-precision', 'compare', *again.values(), '--out', str(out)])}",
    ]


def _new_places(diagnosis: Diagnosis) -> tuple[dict[Side, str], Path]:
    """Return where the second runs and their comparison go, numbered from the second recapture on.

    A training refuses a run directory that exists.
    """
    runs = {Side.BASELINE: diagnosis.baseline, Side.CANDIDATE: diagnosis.candidate}

    def named(number: int) -> tuple[dict[Side, str], Path]:
        name = "refined" if number == 1 else f"refined-{number}"
        again = {side: f"{run.rstrip('/')}-{name}" for side, run in runs.items()}
        return again, Path(again[Side.CANDIDATE]).parent / f"compare-{name}"

    def taken(again: Mapping[Side, str], out: Path) -> bool:
        return any(map(os.path.lexists, [*again.values(), str(out)]))

    return next(places for places in map(named, itertools.count(1)) if not taken(*places))


def with_second_pass(diagnosis: Diagnosis, path: str | Path) -> Diagnosis:
    """Return a diagnosis whose remedies name the settings of the second pass where they will be.

    Where there are none to write (elements were kept, nothing precedes the record, a dump of another tool),
    a remedy names the setting that keeps elements.
    """
    flag = "--precision-debug-config"
    named = f"{flag} {shlex.quote(str(path))}"
    if diagnosis.refinement is None:
        named = "--precision-debug-set capture.level=tensor (a dump of msprobe: its task tensor)"
    findings = tuple(
        replace(finding, remedy=finding.remedy.replace(f"{flag} {NAME}", named))
        for finding in diagnosis.findings
    )
    return replace(diagnosis, findings=findings)


def _elements(refinement: Refinement) -> str:
    return f"{count(refinement.records, 'record')}, {byte_count(refinement.payload_bytes)} a run"


def _flags(refinement: Refinement, side: Side, config: str, out: str) -> str:
    own = refinement.overrides[side]
    words = ["--precision-debug", "--precision-debug-config", config, "--precision-debug-out", out]
    return shlex.join([*words, *(["--precision-debug-set", *own] if own else [])])
