"""What a comparison writes: ``verdict.json``, comparisons, the settings of a second pass, the reports."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_precision.align.mapping import Mapping as NameMapping
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.fold.folding import Folded
from mindspeed_precision.permissions import make_directory, open_new, write_text
from mindspeed_precision.records import Comparison, Diagnosis, Pair, Side, TensorRecord
from mindspeed_precision.report import html
from mindspeed_precision.report.facts import ReportFacts, report_facts
from mindspeed_precision.report.markdown import report_markdown
from mindspeed_precision.report.refine_file import NAME, with_second_pass, write_refine_file
from mindspeed_precision.report.verdict_json import verdict_text


def publish(
    diagnosis: Diagnosis,
    directory: str | Path,
    *,
    runs: Mapping[Side, Run],
    mappings: Sequence[NameMapping] = (),
    refine: str | Path | None = None,
    folded: Folded | None = None,
) -> tuple[Diagnosis, dict[str, str]]:
    """Write everything about a diagnosis, its remedies naming what was written.

    Args:
        diagnosis: the answer.
        directory: as in ``write_files``.
        runs: as they were read.
        mappings: names and conventions that differ between them.
        refine: as in ``write_files``.
        folded: for which ranks those of the runs stand; None: for themselves.

    Returns:
        The diagnosis as it was written, and what was written, as ``write_files`` says.

    Raises:
        DumpError: see ``write_files``.
    """
    told = with_second_pass(diagnosis, refine or Path(directory) / NAME)
    facts = report_facts(told, runs, mappings, folded=folded)
    return told, write_files(told, directory, refine=refine, facts=facts)


def write_files(
    diagnosis: Diagnosis,
    directory: str | Path,
    *,
    refine: str | Path | None = None,
    facts: ReportFacts | None = None,
) -> dict[str, str]:
    """Write everything about a diagnosis into ``directory``, replacing what an earlier comparison wrote.

    Args:
        diagnosis: the answer.
        directory: made where it is not there.
        refine: where to write the settings of a second pass, a new file; None: ``refine.yaml`` in
            ``directory``.
        facts: what the reports say beside the diagnosis; None: they are made from the diagnosis alone, and
            say so.

    Returns:
        What was written, in words, to its path; the report last. Without jinja2 there is no ``report``.

    Raises:
        DumpError: the directory cannot be written, or ``refine`` exists.
    """
    out = Path(directory)
    try:
        make_directory(out, exist_ok=True)
        written = {"verdict": "", "comparisons": str(_write_table(diagnosis, out))}
        (out / NAME).unlink(missing_ok=True)
        if diagnosis.refinement is not None:
            written["refine"] = _write_refinement(
                diagnosis, Path(refine or out / NAME), new=refine is not None
            )
        text = verdict_text(diagnosis, config=written.get("refine", ""))
        written["verdict"] = str(_write(out / "verdict.json", text))
        written |= _write_reports(facts or report_facts(diagnosis), out, written.get("refine", ""))
    except OSError as error:
        raise DumpError(f"cannot write the report: {error.strerror}", where=str(out)) from error
    return written


def _write_refinement(diagnosis: Diagnosis, path: Path, *, new: bool) -> str:
    assert diagnosis.refinement is not None
    runs = {"baseline": diagnosis.baseline, "candidate": diagnosis.candidate}
    write_refine_file(diagnosis.refinement, path, **runs, new=new)
    return str(path)


def _write_reports(facts: ReportFacts, out: Path, config: str) -> dict[str, str]:
    """Write ``report.md``, and ``report.html`` where jinja2 is installed; an older page does not survive."""
    written = {"markdown": str(_write(out / "report.md", report_markdown(facts)))}
    page = out / "report.html"
    page.unlink(missing_ok=True)
    if html.available():
        written["report"] = str(_write(page, html.report_html(facts, config=config)))
    return written


def _write(path: Path, text: str) -> Path:
    """Write a file beside its place and move it there: what is half written is never found."""
    part = path.with_name(f".{path.name}.part")
    write_text(part, text, errors="backslashreplace")
    part.replace(path)
    return path


def _write_table(diagnosis: Diagnosis, out: Path) -> Path:
    """Write the table as parquet where pyarrow is installed, else as CSV."""
    rows = [_row(comparison) for comparison in diagnosis.comparisons]
    parquet, plain = out / "comparisons.parquet", out / "comparisons.csv"
    parquet.unlink(missing_ok=True)
    plain.unlink(missing_ok=True)
    if importlib.util.find_spec("pyarrow") is not None:
        import pandas as pd  # half a second to import: only where such a table is written

        with open_new(parquet, "wb") as file:
            pd.DataFrame(rows).to_parquet(file)
        return parquet
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open_new(plain, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return plain


def _cell(value: Any) -> Any:
    """Return what a spreadsheet takes for what it is: NaN is empty, and no text from a run is a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value != value else value


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
