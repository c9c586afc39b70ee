"""Adam's epsilon differs: the default of another optimizer class."""

from __future__ import annotations

from silentbench.case import Answer, case
from silentbench.layouts import ONE

CASE = case(
    "B029",
    "https://github.com/facebookresearch/dlrm/pull/337 (different default eps by framework)",
    "Ascend hyperparameter check list",
    healthy=ONE,
    faulty=ONE.but(settings={"adam_eps": 1e-5}),
    answers=(
        Answer(
            by=("compare",),
            step=0,
            phases=("optimizer",),
            fqn=("*",),
            roles=("hyperparameter",),
            ids=("optimizer.eps",),
        ),
        Answer(
            by=("verify",),
            step=-1,
            phases=("init",),
            fqn=("*",),
            ids=("config.*", "groups.*"),
            says=("adam_eps",),
        ),
    ),
)
