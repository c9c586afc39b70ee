"""What msprobe's tables say: which rows it marks, and where in the model each of them is."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MARKED = ("warning", "error", "different")
"""Words in the column ``Result`` that mark a row; ``pass`` and an empty cell do not."""

_MODULE = re.compile(
    r"Module\.(?:\d+\.)?(?P<fqn>.*?)\.?(?P<kind>\w+)\.(?P<pass>forward|backward|parameters_grad)\.\d+"
)
_WRAPPERS = re.compile(r"^(?:module\.?)+")
_NUMBERED = re.compile(r"^(.*\.(?:forward|backward)\.\d+|.*\.parameters_grad\.\d+)")

PHASES = {
    "forward": ("fprop",),
    "backward": ("dgrad", "wgrad"),
    "parameters_grad": ("wgrad", "accumulate"),
}
"""What of a step a row of msprobe's is about, by our names."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row that is marked.

    Attributes:
        name: as msprobe has it.
        result: its verdict.
        fqn: the module that it is of, or that called the function; None: not known.
        phases: of the step.
    """

    name: str
    result: str
    fqn: str | None
    phases: tuple[str, ...]


def marked(table: Path, construct: Path) -> Iterator[Row]:
    """Yield the marked rows of a table, in its order.

    Args:
        table: directory with the table.
        construct: msprobe's ``construct.json`` of the target: by function the module that called it.
    """
    parents = json.loads(construct.read_text(encoding="utf-8"))
    for path in sorted(table.glob("compare_result*.csv")):
        with path.open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                result = (row.get("Result") or "").strip().lower()
                if any(word in result for word in MARKED):
                    fqn, phases = place(row["NPU Name"], parents)
                    yield Row(name=row["NPU Name"], result=result, fqn=fqn, phases=phases)


def place(name: str, parents: Mapping[str, object]) -> tuple[str | None, tuple[str, ...]]:
    """Return module and phases of a row; a function's are those of the module that called it."""
    found = _MODULE.match(name)
    if found is not None:
        return _WRAPPERS.sub("", found["fqn"]), PHASES[found["pass"]]
    whole = _NUMBERED.match(name)
    phases = next((known for word, known in PHASES.items() if f".{word}." in name), ())
    parent = parents.get(whole.group(1)) if whole else None
    called_by = parent[0] if isinstance(parent, list) and parent else parent
    of = _MODULE.match(str(called_by)) if called_by else None
    if of is None:
        return None, phases
    return _WRAPPERS.sub("", of["fqn"]), PHASES[of["pass"]]
