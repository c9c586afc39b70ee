"""adam_beta2 is set to 0.95 and never reaches the optimizer, which uses its default 0.999.

The first two steps have the same loss and norm; the configuration of both runs has the same text.
"""

from __future__ import annotations

from silentbench.answers import by_check, by_compare, by_verify
from silentbench.case import case, plant
from silentbench.layouts import ONE


def without_betas(wrapped, instance, args, kwargs):
    return wrapped(*args, **{key: value for key, value in kwargs.items() if key != "betas"})


CASE = case(
    "B014",
    "https://gitcode.com/Ascend/MindSpeed-Core-MS commit 205f645 (MR !70)",
    healthy=ONE.but(settings={"optimizer": {"adam_beta2": 0.95}}),
    patches=(
        plant(
            "torch.optim.adamw:AdamW.__init__",
            without_betas,
            "(self, params, lr, betas, eps, weight_decay, amsgrad, *, maximize, foreach, capturable, "
            "differentiable, fused)",
            "betas were not passed to the optimizer",
        ),
    ),
    answers=(
        by_compare(0, "optimizer", "*", "optimizer.beta", roles="hyperparameter", says="0.95 0.999"),
        by_verify("optimizer.beta", "*", step=0, says="0.95 0.999"),
        by_check(0, "optimizer", "*", "optimizer.not_as_configured", says="0.95 0.999"),
    ),
)
