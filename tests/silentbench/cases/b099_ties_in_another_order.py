"""Experts of equal score are chosen in another order.

Topk without sorting. The result is as right as the other.
"""

from __future__ import annotations

from silentbench.answers import by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE


def tied(wrapped, instance, args, kwargs):
    logits, *rest = args
    return wrapped(logits.detach().round(decimals=1) + (logits - logits.detach()), *rest, **kwargs)


def last_first(wrapped, instance, args, kwargs):
    logits, *rest = args
    probs, routes = wrapped(logits.flip(-1), *rest, **kwargs)
    return probs.flip(-1), routes.flip(-1)


def routing(wrapper, why):
    target = "megatron.core.transformer.moe.router:TopKRouter.routing"
    return plant(target, wrapper, "(self, logits, padding_mask)", why)


CASE = case(
    "B099",
    "https://gitcode.com/Ascend/MindSpeed commit 73cb468b",
    healthy=MIXTURE.but(patches=(routing(tied, "scores with ties"),)),
    faulty=MIXTURE.but(
        patches=(routing(last_first, "ties the other way round"), routing(tied, "scores with ties"))
    ),
    answers=(by_compare(0, "fprop", "decoder.layers.0.mlp.router*", "fprop.value", roles="output"),),
)
