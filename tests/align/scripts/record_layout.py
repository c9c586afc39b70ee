"""Trains and records one run, alone or as a rank under torchrun: ``record_layout.py OUT JSON``.

JSON: ``settings`` (of the trainer), ``steps``, ``overrides`` (of the session), ``plant`` (see ``PLANTS``),
``config`` (a file of settings; may be absent).
"""

import json
import sys
from pathlib import Path

from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings

TARGET = "decoder.layers.1.mlp.linear_fc1.weight"
PROJECTION = "decoder.layers.0.self_attention.linear_proj.weight"
NORM = "decoder.layers.1.input_layernorm.weight"


def parameter_of(trainer, name):
    found = [p for n, p in trainer.named_parameters().items() if n.endswith(name)]
    return found[0] if found else None


def layer_of(trainer, number):
    """Return a layer by its number in the whole model, from 0, wherever its pipeline stage is; or None."""
    modules = (module for chunk in trainer.model for module in chunk.modules())
    found = [m for m in modules if getattr(m, "layer_number", 0) == number + 1 and hasattr(m, "mlp")]
    return found[0] if found else None


def tensor_rank():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank()


def transposed_shard(trainer):
    """On the last tensor-parallel rank dW of one weight lies as its transpose would."""
    parameter = parameter_of(trainer, PROJECTION)
    if parameter is not None and tensor_rank() == trainer.settings.tp - 1:
        parameter.register_hook(lambda grad: grad.t().contiguous().view_as(grad))


def scaled_gradient(trainer, factor=1.0003, name=TARGET):
    """The reduced gradient of one weight is 1.0003 times what it should be, on every rank."""
    finalize = trainer.config.finalize_model_grads_func

    def scaled(*args, **kwargs):
        result = finalize(*args, **kwargs)
        parameter = parameter_of(trainer, name)
        if parameter is not None:
            parameter.main_grad.mul_(factor)
        return result

    trainer.config.finalize_model_grads_func = scaled


def barely_scaled_gradient(trainer):
    """The same by 1.00002."""
    scaled_gradient(trainer, factor=1.00002)


def scaled_norm(trainer):
    """The same by 1.0003 of a norm's gradient, which under sequence parallelism is a sum over ranks."""
    scaled_gradient(trainer, name=NORM)


def scaled_dgrad(trainer, steps=range(100)):
    """What the backward pass sends into one MLP is off by three in a million: far below any fixed bound."""

    def scale(_module, _arguments, outputs):
        if trainer.step in steps:
            outputs[0].register_hook(lambda gradient: gradient * (1 + 3e-6))

    for chunk in trainer.model:
        for name, module in chunk.named_modules():
            if name.endswith("decoder.layers.1.mlp"):
                module.register_forward_hook(scale)


def scaled_dgrad_at_step_3(trainer):
    """The same at one step alone."""
    scaled_dgrad(trainer, steps=(3,))


def unreduced_norm(trainer):
    """The gradient of one norm misses its sum over the tensor-parallel group (sequence parallelism)."""
    parameter_of(trainer, NORM).sequence_parallel = False


def scaled_stage(trainer):
    """Every reduced gradient of the last pipeline stage, except the tied embedding's, is doubled."""
    from megatron.core import parallel_state

    finalize = trainer.config.finalize_model_grads_func

    def scaled(*args, **kwargs):
        result = finalize(*args, **kwargs)
        if parallel_state.is_pipeline_last_stage():
            for name, parameter in trainer.named_parameters().items():
                if "layers" in name:
                    parameter.main_grad.mul_(2)
        return result

    trainer.config.finalize_model_grads_func = scaled


def wrong_rows(trainer, steps=range(100)):
    """Rows 40 to 47 of dW of one weight come in reverse and a trifle too large: its norm moves by 1e-5."""
    layer = layer_of(trainer, 1)
    if layer is None:
        return
    parameter = layer.mlp.linear_fc1.weight
    rows, first = parameter.shape[0], 40 - tensor_rank() * parameter.shape[0]

    def spoilt(grad):
        if trainer.step not in steps or not 0 <= first < rows:
            return grad
        changed = grad.clone()
        changed[first : first + 8] = grad[first : first + 8].flip(0) * 1.0004
        return changed

    parameter.register_hook(spoilt)


def wrong_rows_at_step_3(trainer):
    """The same at one step alone."""
    wrong_rows(trainer, steps=(3,))


def forward_and_rows(trainer):
    """The MLP of the first layer gives 1.001 times what it should; and ``wrong_rows`` in the second layer."""
    layer = layer_of(trainer, 0)
    if layer is not None:
        layer.mlp.register_forward_hook(lambda _, args, out: (out[0] * 1.001, *out[1:]))
    wrong_rows(trainer)


def scaled_mlp(trainer):
    """The MLP of the second layer gives 1.001 times what it should: between two chunks of the first stage."""
    layer = layer_of(trainer, 1)
    if layer is not None:
        layer.mlp.register_forward_hook(lambda _, args, out: (out[0] * 1.001, *out[1:]))


def module_of(trainer, name):
    return trainer.model[0].module.get_submodule(name)


def on_last_rank(trainer, name, change):
    """On the last tensor-parallel rank a module's output is ``change(output)``."""

    def changed(module, args, output):
        return (change(output[0]), *output[1:])

    if tensor_rank() == trainer.settings.tp - 1:
        module_of(trainer, name).register_forward_hook(changed)


def scaled_output(trainer):
    """One rank's shard of the output of a column-parallel linear is 1.001 times what it should be."""
    on_last_rank(trainer, "decoder.layers.0.mlp.linear_fc1", lambda output: output * 1.001)


def scaled_output_of_context(trainer):
    """The output of a linear is 1.001 times what it should be for the tokens of one context-parallel rank."""
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_rank() == 1:
        on_last_rank(trainer, "decoder.layers.0.mlp.linear_fc1", lambda output: output * 1.001)


def scaled_expert(trainer):
    """The first linear of one expert gives 1.001 times what it should, on each rank with a part of it."""
    for chunk in trainer.model:
        for name, module in chunk.named_modules():
            if name.endswith("layers.0.mlp.experts.local_experts.1.linear_fc1"):
                module.register_forward_hook(lambda _, args, out: (out[0] * 1.001, *out[1:]))


def rolled_rows(trainer):
    """One rank has the rows (tokens) of its shard of a column-parallel linear's output one place off."""
    on_last_rank(trainer, "decoder.layers.1.mlp.linear_fc1", lambda output: output.roll(1, 0))


def unreduced_output(trainer):
    """The output of a row-parallel linear is each rank's own partial sum: its all-reduce is missing."""
    module_of(trainer, "decoder.layers.0.self_attention.linear_proj").explicit_expert_comm = True


FAULTS = (
    transposed_shard,
    scaled_gradient,
    barely_scaled_gradient,
    scaled_norm,
    scaled_dgrad,
    scaled_dgrad_at_step_3,
    unreduced_norm,
    scaled_stage,
    wrong_rows,
    wrong_rows_at_step_3,
    forward_and_rows,
    scaled_mlp,
    scaled_output,
    scaled_output_of_context,
    scaled_expert,
    rolled_rows,
    unreduced_output,
)
PLANTS = {"": None, **{fault.__name__: fault for fault in FAULTS}}

if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    record_training(
        TrainerSettings(**asked["settings"]),
        Path(sys.argv[1]),
        steps=asked["steps"],
        plant=PLANTS[asked["plant"]],
        config=Path(asked["config"]) if "config" in asked else None,
        overrides=asked["overrides"],
    )
