"""The epsilon of the norms is asked for and ignored: a layer does not pass it on."""

from __future__ import annotations

from silentbench.answers import by_check, by_compare
from silentbench.case import case, plant
from silentbench.layouts import ONE


def default_epsilon(wrapped, instance, args, kwargs):
    return wrapped(*args, **{key: value for key, value in kwargs.items() if key != "eps"})


CASE = case(
    "B028",
    "https://github.com/NVIDIA/Megatron-LM/commit/7711346974",
    "https://github.com/NVIDIA/Megatron-LM/pull/5750",
    healthy=ONE.but(settings={"transformer": {"layernorm_epsilon": 1e-6}}),
    patches=(
        plant(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            default_epsilon,
            "(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)",
            "the layer did not pass layernorm_epsilon to its norms",
        ),
    ),
    answers=(
        by_compare(
            0, "fprop", "decoder.layers.0.input_layernorm", "fprop.value config.differs", roles="output"
        ),
        by_check(0, "fprop", "decoder.layers.*.input_layernorm", "config.not_in_effect"),
    ),
)
