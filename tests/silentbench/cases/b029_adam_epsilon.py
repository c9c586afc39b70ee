"""Adam's epsilon differs: the default of another optimizer class."""

from __future__ import annotations

from silentbench.answers import by_compare, by_verify
from silentbench.case import case
from silentbench.layouts import ONE

CASE = case(
    "B029",
    "https://github.com/facebookresearch/dlrm/pull/337 (different default eps by framework)",
    "Ascend hyperparameter check list",
    healthy=ONE,
    faulty=ONE.but(settings={"adam_eps": 1e-5}),
    answers=(
        by_compare(0, "optimizer", "*", "optimizer.eps", roles="hyperparameter"),
        by_verify("config.differs optimizer.eps", "*", says="eps"),
        by_verify("optimizer.eps", "*", step=0),
    ),
)
