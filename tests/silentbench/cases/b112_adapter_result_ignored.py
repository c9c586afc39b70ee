"""A fused path leaves out the adapter beside a linear: its weights get no gradient and never move."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case
from silentbench.layouts import ONE
from silentbench.plants import layer_built

PLACE = "decoder.layers.*.self_attention.linear_qkv.adapter*"


def adapted(wrapped, instance, args, kwargs):
    _adapter(wrapped, instance, args, kwargs, used=True)


def ignored(wrapped, instance, args, kwargs):
    _adapter(wrapped, instance, args, kwargs, used=False)


def _adapter(wrapped, instance, args, kwargs, *, used):
    import torch

    wrapped(*args, **kwargs)
    linear = instance.self_attention.linear_qkv
    linear.adapter = torch.nn.Sequential(
        torch.nn.Linear(32, 4, bias=False), torch.nn.Linear(4, linear.weight.shape[0], bias=False)
    )

    def hook(module, given, output):
        delta = module.adapter(given[0])
        return (output[0] + delta, *output[1:]) if used else output

    linear.register_forward_hook(hook)


WHY = "an adapter of two small linears"
CASE = case(
    "B112",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit b1bfdf90",
    "https://gitcode.com/Ascend/MindSpeed-LLM commit 7fcab997",
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634",
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5396",
    healthy=ONE.but(patches=(layer_built(adapted, WHY),)),
    faulty=ONE.but(patches=(layer_built(ignored, WHY),)),
    answers=(
        by_compare(0, "fprop", "decoder.layers.0.self_attention.linear_qkv", "fprop.value", roles="output"),
        by_check(0, "wgrad accumulate reduce optimizer", PLACE, "wgrad.missing symptom.zero_gradient"),
    ),
)
