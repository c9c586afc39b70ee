"""What a step says of its gradient norm and of clipping: numbers that several checks read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_precision.records import Phase, Role, TensorRecord
from mindspeed_precision.verify.run_facts import RunFacts


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How gradients are clipped.

    Attributes:
        limit: largest norm; 0: gradients are not clipped; None: it is not known.
        scaled: gradients carry a loss scale until they are clipped (fp16).
        scale: of the loss, where it is constant; None: it changes, by powers of two.
    """

    limit: float | None
    scaled: bool
    scale: float | None

    def loss_scale(self, ratio: float) -> float:
        """Return the loss scale that a ratio of norms, with and without it, is nearest to."""
        if not self.scaled:
            return 1.0
        if self.scale:
            return self.scale
        return 2.0 ** round(math.log2(ratio)) if ratio > 0 and math.isfinite(ratio) else 1.0


def clipping_of(facts: RunFacts) -> Clipping | None:
    """Return how Megatron's optimizer clips; None where the optimizer is none of Megatron's.

    A loop of its own clips before the optimizer is called, so that no gradient before clipping is recorded.
    """
    config = facts.config.get("optimizer_config", {})
    if not config:
        return None
    limit, scale = config.get("clip_grad"), config.get("loss_scale")
    return Clipping(
        limit=float(limit) if isinstance(limit, (int, float)) else None,
        scaled=bool(config.get("fp16")),
        scale=float(scale) if isinstance(scale, (int, float)) else None,
    )


def distributed(facts: RunFacts) -> bool:
    """Tell whether a rank has reduced gradients of its own range of the parameters alone."""
    sections = ("ddp_config", "optimizer_config", "megatron_args")
    return any(facts.config.get(section, {}).get("use_distributed_optimizer") for section in sections)


def recorded_norms(facts: RunFacts) -> dict[tuple[int, int], TensorRecord]:
    """Return the norm that each rank worked with, by step and rank; steps that were skipped have none."""
    return {
        (record.key.step, number): record
        for number, record in facts.everywhere(Phase.CLIP, Role.GRAD_NORM)
        if not record.key.slot and record.value is not None and math.isfinite(record.value)
    }
