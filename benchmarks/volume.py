"""How many bytes a recorded step digests, by phase and role."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.record.elements import width_of

STEP = 1
MIB = 2**20


def volume_table(run: Path) -> Iterator[str]:
    """Yield the lines of a table in Markdown, largest first."""
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for record in load_run(run).ranks[0].records:
        if record.key.step == STEP:
            kind = record.key.phase.value, f"{record.key.role.value} {record.key.slot}".strip()
            kind = kind if record.key.role.value == "main_grad" else (kind[0], record.key.role.value)
            count[kind] += 1
            size[kind] += math.prod(record.shape) * width_of(record.dtype)
    yield "| phase | role | records | MiB |"
    yield "|---|---|---|---|"
    for kind, number in size.most_common():
        yield f"| {kind[0]} | {kind[1]} | {count[kind]} | {number / MIB:.1f} |"
    yield f"| all | | {sum(count.values())} | {sum(size.values()) / MIB:.1f} |"
