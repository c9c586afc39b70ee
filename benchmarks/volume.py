"""How many bytes a recorded step digests, by phase and role, and how many it has digested before."""

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
    again: Counter[tuple[str, str]] = Counter()
    seen: set[tuple[object, ...]] = set()
    for record in load_run(run).ranks[0].records:
        if record.key.step == STEP:
            kind = record.key.phase.value, f"{record.key.role.value} {record.key.slot}".strip()
            kind = kind if record.key.role.value == "main_grad" else (kind[0], record.key.role.value)
            count[kind] += 1
            volume = math.prod(record.shape) * width_of(record.dtype)
            size[kind] += volume
            bits = record.digest.fingerprint, record.digest.unordered, record.dtype, volume
            again[kind] += volume if bits in seen else 0
            seen.add(bits)
    yield "| phase | role | records | MiB | with bits that an earlier record of the step has |"
    yield "|---|---|---|---|---|"
    for kind, number in size.most_common():
        yield f"| {kind[0]} | {kind[1]} | {count[kind]} | {number / MIB:.1f} | {again[kind] / MIB:.1f} |"
    total, repeated = sum(size.values()) / MIB, sum(again.values()) / MIB
    yield f"| all | | {sum(count.values())} | {total:.1f} | {repeated:.1f} |"
