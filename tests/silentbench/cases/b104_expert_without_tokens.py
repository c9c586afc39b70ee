"""An expert without tokens gets NaN for a gradient when activations are recomputed."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import MIXTURE
from silentbench.plants import layer_built


def nan_where_zero(grad):
    return grad if grad.any() else grad * float("nan")


def last_without_tokens(wrapped, instance, args, kwargs):
    probs, routes = wrapped(*args, **kwargs)
    probs, routes = probs.clone(), routes.clone()
    probs[:, -1], routes[:, -1] = 0, False
    return probs, routes


def nan_without_tokens(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    if instance.layer_number == 2:
        instance.mlp.experts.local_experts[3].linear_fc2.weight.register_hook(nan_where_zero)


ROUTES = plant(
    "megatron.core.transformer.moe.router:TopKRouter.routing",
    last_without_tokens,
    "(self, logits, padding_mask)",
    "the router sends nothing to the last expert",
)


CASE = case(
    "B104",
    "https://gitcode.com/Ascend/MindSpeed commit befe576b (MR !1466)",
    healthy=MIXTURE.but(settings={"ddp": {"check_for_nan_in_grad": False}}, patches=(ROUTES,)),
    patches=(layer_built(nan_without_tokens, "the branch for empty tensors"),),
    answers=(
        by_compare(0, "wgrad", "decoder.layers.1.mlp.experts.*3.linear_fc2*", "nonfinite.first"),
        by_check(0, "wgrad", "decoder.layers.1.mlp.experts.*3.linear_fc2*", "nonfinite.first"),
    ),
)
