"""The trainings that cases share: one healthy run of each is recorded, whatever is planted in others."""

from __future__ import annotations

from silentbench.case import Training

ONE = Training()
"""One process, two microbatches of two samples."""
FOUR = ONE.but(settings={"microbatches": 4})
"""One process with as many microbatches as two data-parallel ranks with two each."""
BF16 = ONE.but(settings={"dtype": "bf16"})
FP16 = ONE.but(settings={"dtype": "fp16"})

TP = ONE.but(world=2, settings={"tp": 2})
SP = TP.but(settings={"sequence_parallel": True})
PP = ONE.but(world=2, settings={"pp": 2})
DP = ONE.but(world=2)
"""Two data-parallel ranks, with two microbatches each."""
DISTOPT = DP.but(settings={"distributed_optimizer": True})

MIXTURE = ONE.but(settings={"experts": 4})
