"""Trains and records several runs in the same processes: ``record_run_faults.py OUT JSON``.

JSON: a list of ``{name, fault, settings}``: a directory in OUT, a fault (see ``FAULTS``; or empty), the
trainer's settings. Three steps each. Each fault is one that was met in practice.
"""

import contextlib
import itertools
import json
import sys
from pathlib import Path

import torch

from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings


def modules_of(trainer, ending):
    return [
        module for chunk in trainer.model for name, module in chunk.named_modules() if name.endswith(ending)
    ]


def around_loss(trainer, change):
    """Let ``change(losses, mask)`` stand in the way of what the loss function is given."""
    forward_step = trainer.forward_step

    def changed(data_iterator, model):
        output, loss_function = forward_step(data_iterator, model)
        mask = loss_function.args[0]
        return output, lambda losses: loss_function.func(*change(mask, losses))

    trainer.forward_step = changed


def noncontiguous_gradient(trainer):
    """The backward of an output layer hands a transposed gradient to the all-reduce, which loses its sum."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    layer = modules_of(trainer, "output_layer")[0]

    def forward(hidden, weight=None, **_):
        whole = copy_to_tensor_model_parallel_region(hidden)
        weight = layer.weight if weight is None else weight
        return torch.matmul(whole.transpose(0, 1), weight.t()).transpose(0, 1).contiguous(), None

    layer.forward = forward


def gathered_logits(trainer):
    """Logits are gathered over the tensor-parallel group, and the loss is parallel over the vocabulary."""
    modules_of(trainer, "output_layer")[0].gather_output = True


def one_seed(trainer):
    """The tracker of what is split has the same seed on every tensor-parallel rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    states["model-parallel-rng"] = states["data-parallel-rng"].clone()
    tracker.set_states(states)


def apart_seeds(trainer):
    """The default generator, which drops whole activations out, differs over the tensor-parallel group."""
    from megatron.core import parallel_state

    torch.cuda.manual_seed(99 + parallel_state.get_tensor_model_parallel_rank())


def unreduced_norm(trainer):
    """The gradient of one norm misses its sum over the tensor-parallel group (sequence parallelism)."""
    modules_of(trainer, "layers.1.input_layernorm")[0].weight.sequence_parallel = False


def unreduced_embedding(trainer):
    """The gradient of the tied embedding is not summed over the first and the last pipeline stage."""
    import megatron.core.distributed.finalize_model_grads  # noqa: F401  the name is a function's, too

    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    trainer._cleanup.callback(
        setattr, module, "_allreduce_word_embedding_grads", module._allreduce_word_embedding_grads
    )
    module._allreduce_word_embedding_grads = lambda *args, **kwargs: None


def mask_of_the_last_microbatch(trainer):
    """Attention reads a global that the forward of the latest microbatch set, and so does recomputation."""
    seen, forward_step = [0], trainer.forward_step

    def counted(data_iterator, model):
        seen[0] += 1
        return forward_step(data_iterator, model)

    trainer.forward_step = counted
    for attention in modules_of(trainer, "core_attention"):
        attention.register_forward_pre_hook(lambda _, args: (args[0] * (1 + seen[0] % 2), *args[1:]))


def same_data(trainer):
    """Every data-parallel rank reads what the first one reads."""
    from megatron.core import parallel_state

    first = {"rank": 0}
    real = parallel_state.get_data_parallel_rank
    parallel_state.get_data_parallel_rank = lambda *args, **kwargs: first["rank"]
    try:
        batches = trainer._batches()
        head = next(batches)  # a generator asks for its rank when it begins
    finally:
        parallel_state.get_data_parallel_rank = real
    trainer._data = itertools.chain([head], batches)


def nan_in_a_layer(trainer):
    """One element of the second layer's MLP output is NaN on the last rank, in the second step."""
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        for mlp in modules_of(trainer, "layers.1.mlp"):
            mlp.register_forward_hook(lambda _, args, out: (_spoilt(trainer, out[0]), *out[1:]))


def _spoilt(trainer, output):
    if trainer.step != 1:
        return output
    changed = output.clone()
    changed.view(-1)[5] = float("nan")
    return changed


def random_states_stay(trainer):
    """Recomputation does not restore the random states of the forward pass."""
    import megatron.core.tensor_parallel.random as module

    name = next(n for n in ("_set_all_rng_states", "_set_cuda_rng_state") if hasattr(module, n))
    trainer._cleanup.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, lambda *args, **kwargs: None)


def doubled_after_the_loss(trainer):
    """The schedule gets twice the loss that the loss function should give, and reports the right one."""
    forward_step = trainer.forward_step

    def changed(data_iterator, model):
        output, loss_function = forward_step(data_iterator, model)

        def doubled(losses):
            loss, tokens, report = loss_function(losses)
            return _Twice.apply(loss), tokens, report

        return output, doubled

    trainer.forward_step = changed


class _Twice(torch.autograd.Function):
    """The number as it is, twice its gradient."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def short_second_microbatch(trainer):
    """Half the tokens of every second microbatch do not count, and each microbatch is a mean of its own."""

    def batches(source):
        for number, batch in enumerate(source):
            if number % 2:
                batch["loss_mask"][:, : batch["loss_mask"].shape[1] // 2] = 0
            yield batch

    trainer._data = batches(trainer._data)


def shifted_loss(trainer):
    """Something is added to each loss."""
    around_loss(trainer, lambda mask, losses: (mask, losses + 0.01))


def one_microbatch_twice(trainer):
    """Every batch is read twice."""
    batches = trainer._data
    trainer._data = (batch for batch in batches for _ in range(2))


def dropout_off_after_a_step(trainer):
    """An evaluation after the first step sets every probability to zero."""
    train = trainer.train_one_step

    def train_and_evaluate():
        result = train()
        for chunk in trainer.model:
            for module in chunk.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        return result

    trainer.train_one_step = train_and_evaluate


def evaluation(trainer):
    """An evaluation after each step, as Megatron's: forward only, in eval mode, train mode after it."""
    train, batches = trainer.train_one_step, trainer._batches()

    def train_and_evaluate():
        result = train()
        with torch.no_grad():
            for chunk in trainer.model:
                chunk.eval()
                trainer._forward_step(batches, chunk)
                chunk.train()
        return result

    trainer.train_one_step = train_and_evaluate


def first_batch_again(trainer):
    """The second step's batch is that of the first one; new ones follow."""
    batches, n = trainer._data, trainer.settings.microbatches
    first = list(itertools.islice(batches, n))
    trainer._data = itertools.chain(first, first, batches)


def lost_token(trainer):
    """The first rank takes the range of its vocabulary for one shorter than it is."""
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_rank() == 0:
        embedding = modules_of(trainer, "word_embeddings")[0]
        embedding.vocab_end_index = ord("a")  # the letters of the text are beyond


def lossy_transfer(trainer):
    """What a pipeline stage receives has a hundredth of its elements zero."""
    for chunk in trainer.model:
        model = chunk.module
        take = model.set_input_tensor

        def lossy(tensors, take=take):
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                if tensor is not None:
                    tensor.data.view(-1)[::100] = 0
            take(tensors)

        model.set_input_tensor = lossy


FAULTS = (
    noncontiguous_gradient,
    gathered_logits,
    one_seed,
    apart_seeds,
    unreduced_norm,
    unreduced_embedding,
    mask_of_the_last_microbatch,
    same_data,
    nan_in_a_layer,
    random_states_stay,
    doubled_after_the_loss,
    short_second_microbatch,
    shifted_loss,
    one_microbatch_twice,
    dropout_off_after_a_step,
    first_batch_again,
    evaluation,
    lost_token,
    lossy_transfer,
)
PLANTS = {"": None, **{fault.__name__: fault for fault in FAULTS}}

if __name__ == "__main__":
    for one in json.loads(sys.argv[2]):
        # Megatron refuses to go on with a gradient that is NaN: the run ends there
        expected = RuntimeError if one["fault"] == "nan_in_a_layer" else ()
        with contextlib.suppress(expected):
            record_training(
                TrainerSettings(**one["settings"]),
                Path(sys.argv[1]) / one["name"],
                steps=3,
                plant=PLANTS[one["fault"]],
            )
