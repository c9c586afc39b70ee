"""A fault that one may plant in a training, whatever records it."""

from __future__ import annotations

from typing import Any


def scale_dw(trainer: Any, module: str, factor: float) -> None:
    """Multiply the dW that one parallel linear's backward returns; dgrad is left as it is."""
    from megatron.core.tensor_parallel import layers

    model = trainer.model[0]
    while hasattr(model, "module"):  # wrappers
        model = model.module
    found = dict(model.named_modules())[module]
    function = layers.LinearWithGradAccumulationAndAsyncCommunication
    plain = function.backward

    def wrong(ctx: Any, grad_output: Any) -> Any:
        gradients = list(plain(ctx, grad_output))
        if ctx.saved_tensors[1].data_ptr() == found.weight.data_ptr() and gradients[1] is not None:
            gradients[1] = gradients[1] * factor
        return tuple(gradients)

    function.backward = staticmethod(wrong)
