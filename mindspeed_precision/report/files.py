"""What a comparison writes: ``verdict.json``, the table of comparisons, the settings of a second pass."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from mindspeed_precision.diagnose.window import capture_window
from mindspeed_precision.errors import DumpError
from mindspeed_precision.records import Comparison, Diagnosis, Pair, TensorRecord
from mindspeed_precision.report.verdict_json import verdict_text


def write_files(diagnosis: Diagnosis, directory: str | Path) -> dict[str, str]:
    """Write everything about a diagnosis into ``directory``, replacing what an earlier comparison wrote.

    Returns:
        What was written, in words, to its path.

    Raises:
        DumpError: the directory cannot be written.
    """
    out = Path(directory)
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = {"verdict": str(_write(out / "verdict.json", verdict_text(diagnosis)))}
        written["comparisons"] = str(_write_table(diagnosis, out))
        window, path = capture_window(diagnosis), out / "capture_window.yaml"
        path.unlink(missing_ok=True)
        if window is not None:
            written["window"] = str(_write(path, _window_text(window)))
    except OSError as error:
        raise DumpError(f"cannot write the report: {error.strerror}", where=str(out)) from error
    return written


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _write_table(diagnosis: Diagnosis, out: Path) -> Path:
    """Write the table as parquet where pyarrow is installed, else as CSV."""
    import pandas as pd  # a second to import: only where a table is written

    frame = pd.DataFrame([_row(comparison) for comparison in diagnosis.comparisons])
    parquet, csv = out / "comparisons.parquet", out / "comparisons.csv"
    parquet.unlink(missing_ok=True)
    csv.unlink(missing_ok=True)
    if importlib.util.find_spec("pyarrow") is not None:
        frame.to_parquet(parquet)
        return parquet
    frame.to_csv(csv, index=False)
    return csv


def _row(comparison: Comparison) -> dict[str, Any]:
    pair, key = comparison.pair, comparison.key
    record: TensorRecord = pair.candidate if isinstance(pair, Pair) else pair.record
    return {
        "rank": pair.rank,
        "seq": record.seq,
        "step": key.step,
        "microbatch": key.microbatch,
        "phase": key.phase.value,
        "fqn": key.fqn,
        "role": key.role.value,
        "slot": key.slot,
        "occurrence": key.occurrence,
        "recomputed": key.recomputed,
        "shape": "x".join(map(str, record.shape)),
        "dtype": record.dtype,
        "verdict": comparison.verdict.value,
        "reason": comparison.reason,
        **comparison.metrics,
    }


def _window_text(window: dict[str, Any]) -> str:
    """Write a settings overlay: JSON is YAML, and needs no writer of its own."""
    lines = [
        "# Keeps the elements of the divergent window. Rerun both runs with",
        "#   --precision-debug-config capture_window.yaml",
        "capture:",
        "  rules:",
        *(f"    - {json.dumps(rule)}" for rule in window["capture"]["rules"]),
    ]
    return "\n".join(lines) + "\n"
