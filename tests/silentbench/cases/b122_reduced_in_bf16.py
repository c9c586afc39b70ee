"""Gradients are accumulated and reduced in bfloat16: another policy of mixed precision."""

from __future__ import annotations

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import BF16

CASE = case(
    "B122",
    "Ascend practical case",
    healthy=BF16,
    faulty=BF16.but(settings={"ddp": {"grad_reduce_in_fp32": False}}),
    answers=(
        by_compare(0, "accumulate", "*", "layout.kind_differs wgrad.accumulation config.differs"),
        by_verify("config.differs", says="grad_reduce_in_fp32"),
    ),
)
