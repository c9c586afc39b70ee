"""Trains and records several runs in the same processes: ``record_layouts.py OUT JSON``.

JSON: a list of ``{name, start, plant, settings}``: a directory in OUT, the name of the run to begin as (or
empty), a fault (see ``PLANTS``; or empty), the trainer's settings. Two steps each.

The faults are three kinds, and each layout has its own of each: a reduction that is left out, a gradient
whose elements lie as those of its transpose, a gradient of twice its size.
"""

import json
import sys
from pathlib import Path

from mindspeed_precision.backends.detect import capture_backend
from mindspeed_precision.capture.configuration import parallel_coordinates
from mindspeed_precision.capture.names import canonical_names
from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings

QUIET = ("capture.level=tensor", "capture.modules=false", "capture.collectives=false")


def named(trainer):
    """Return this rank's parameters by the names that records have."""
    return dict(canonical_names(capture_backend(), trainer.model).parameters)


def layer(trainer):
    return f"decoder.layers.{trainer.settings.layers - 1}"


def around_reduction(trainer, before, after):
    finalize = trainer.config.finalize_model_grads_func

    def wrapped(*args, **kwargs):
        kept = before()
        result = finalize(*args, **kwargs)
        after(kept)
        return result

    trainer.config.finalize_model_grads_func = wrapped


def last_of_batch(trainer):
    """Tell whether this is the last rank of those that see another part of the batch or of a sample."""
    at = parallel_coordinates(capture_backend())
    return (at.dp_rank, at.cp_rank) == (at.dp_size - 1, at.cp_size - 1)


def norm_over_tensor_group(trainer):
    """The gradient of one norm misses its sum over the tensor-parallel group (sequence parallelism)."""
    norm = named(trainer).get(f"{layer(trainer)}.input_layernorm.weight")
    if norm is not None:
        norm.sequence_parallel = False


def norm_over_batch_group(trainer):
    """The gradient of one norm misses its mean over the data- and context-parallel ranks."""
    at = parallel_coordinates(capture_backend())
    norm = named(trainer).get(f"{layer(trainer)}.input_layernorm.weight")
    if norm is not None:
        around_reduction(
            trainer,
            before=norm.main_grad.clone,
            after=lambda own: norm.main_grad.copy_(own / (at.dp_size * at.cp_size)),
        )


def input_gradient(trainer):
    """What the backward pass sends out of one column-parallel linear is each rank's own term of its sum."""
    for name, module in canonical_names(capture_backend(), trainer.model).modules:
        if name == f"{layer(trainer)}.mlp.linear_fc1":
            module.explicit_expert_comm = True  # as if somebody else summed it


def tied_embedding(trainer):
    """The gradient of the tied embedding misses its sum over the two stages that use it."""
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]  # the package has its function
    name = "_allreduce_word_embedding_grads"
    trainer._cleanup.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, lambda *args, **kwargs: None)


def transpose(parameter):
    parameter.register_hook(lambda grad: grad.t().contiguous().view_as(grad))


def transposed_shard(trainer):
    """On the last tensor-parallel rank dW of one weight lies as its transpose would."""
    at = parallel_coordinates(capture_backend())
    weight = named(trainer).get(f"{layer(trainer)}.self_attention.linear_proj.weight")
    if weight is not None and at.tp_rank == at.tp_size - 1:
        transpose(weight)


def transposed_expert(trainer):
    """The same of one weight of the last expert, wherever it lives."""
    number = trainer.settings.experts - 1
    weight = named(trainer).get(f"{layer(trainer)}.mlp.experts.local_experts.{number}.linear_fc2.weight")
    if weight is not None:
        transpose(weight)


def transposed_contribution(trainer):
    """The same of what the last data- or context-parallel rank adds to one weight's gradient."""
    weight = named(trainer).get(f"{layer(trainer)}.self_attention.linear_proj.weight")
    if weight is not None and last_of_batch(trainer):
        transpose(weight)


def scaled_stage(trainer):
    """Every reduced gradient of the layers of the last pipeline stage is doubled."""
    at = parallel_coordinates(capture_backend())
    scaled = [p for name, p in named(trainer).items() if "layers" in name and at.pp_rank == at.pp_size - 1]
    double_after_reduction(trainer, scaled)


def scaled_experts(trainer):
    """Every reduced gradient of the experts on the last expert-parallel rank is doubled."""
    at = parallel_coordinates(capture_backend())
    scaled = [p for name, p in named(trainer).items() if ".experts." in name and at.ep_rank == at.ep_size - 1]
    double_after_reduction(trainer, scaled)


def scaled_shard(trainer):
    """The reduced gradient of one weight is doubled on the last tensor-parallel rank."""
    at = parallel_coordinates(capture_backend())
    weight = named(trainer).get(f"{layer(trainer)}.mlp.linear_fc1.weight")
    double_after_reduction(trainer, [weight] if at.tp_rank == at.tp_size - 1 else [])


def scaled_contribution(trainer):
    """What the last data- or context-parallel rank adds to one weight's gradient is doubled."""
    weight = named(trainer).get(f"{layer(trainer)}.mlp.linear_fc1.weight")
    if weight is not None and last_of_batch(trainer):
        weight.register_hook(lambda grad: grad * 2)


def double_after_reduction(trainer, parameters):
    def after(_):
        for parameter in parameters:
            parameter.main_grad.mul_(2)

    around_reduction(trainer, lambda: None, after)


PLANTS = {
    "": None,
    **{
        f.__name__: f
        for f in (
            norm_over_tensor_group,
            norm_over_batch_group,
            input_gradient,
            tied_embedding,
            transposed_shard,
            transposed_expert,
            transposed_contribution,
            scaled_stage,
            scaled_experts,
            scaled_shard,
            scaled_contribution,
        )
    },
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for asked in json.loads(sys.argv[2]):
        start = [f"init_from={folder / asked['start']}"] if asked["start"] else []
        record_training(
            TrainerSettings(**asked["settings"]),
            folder / asked["name"],
            plant=PLANTS[asked["plant"]],
            overrides=[*QUIET, *start],
        )
