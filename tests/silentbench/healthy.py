"""Healthy trainings over layouts, types and seeds: of none of them anything may be said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from silentbench.case import Training

GATED = {"swiglu": True, "rmsnorm": True, "untie": True, "kv_groups": 2}
TYPES = ("fp32", "bf16", "fp16")
SEEDS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A layout beside one process, or a variation of one process that changes nothing.

    Attributes:
        model: settings that both have.
        split: settings that it alone has.
        world: processes.
    """

    model: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    world: int = 2

    @property
    def batch_ranks(self) -> int:
        """Data-parallel ranks."""
        return self.world // (self.split.get("tp", 1) * self.split.get("pp", 1) * self.split.get("cp", 1))


VARIANTS = (
    Variant(world=1),
    Variant(world=1, model={"dropout": 0.1}),
    Variant(world=1, split={"recompute": True}),
    Variant(world=1, model={"gradient_accumulation_fusion": True}),
    Variant(split={"tp": 2}),
    Variant(split={"tp": 2, "sequence_parallel": True}),
    Variant(split={"tp": 2, "sequence_parallel": True}, model=GATED),
    Variant(split={"pp": 2}),
    Variant(split={"pp": 2}, model=GATED),
    Variant(split={"pp": 2, "vpp": 2}, model={"layers": 4}),
    Variant(),
    Variant(split={"overlap": True}),
    Variant(split={"distributed_optimizer": True}),
    Variant(split={"distributed_optimizer": True, "overlap": True}),
    Variant(split={"cp": 2}),
    Variant(split={"ep": 2}, model={"experts": 4}),
    Variant(split={"tp": 2, "sequence_parallel": True}, model={"experts": 4}),
)


@cache
def grid() -> tuple[tuple[Training, Training], ...]:
    """Return pairs ``(reference, candidate)``: 17 variants, three types, two seeds."""
    return tuple(_pairs())


def _pairs() -> Iterator[tuple[Training, Training]]:
    for dtype in TYPES:
        for seed in SEEDS:
            for variant in VARIANTS:
                model = {**variant.model, "dtype": dtype, "seed": seed, "data_seed": seed}
                reference = Training(settings={**model, "microbatches": 2 * variant.batch_ranks})
                settings = {**model, "microbatches": 2, **variant.split}
                candidate = Training(settings=settings, world=variant.world)
                start = reference if variant.world > 1 else None
                yield reference, candidate.but(start=start, repeat=1)
