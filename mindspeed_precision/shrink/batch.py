"""Sequence, batch and length of a shrunk launch; and what it cannot load any more."""

from __future__ import annotations

from math import lcm

from mindspeed_precision.launches import Arguments
from mindspeed_precision.shrink.change import Changes
from mindspeed_precision.shrink.model import up_to_multiple
from mindspeed_precision.shrink.parallel import Parallel

SEQUENCE = 128
STEPS = 10
_OF_THE_BIG_ONE = (
    *("load", "save", "pretrained_checkpoint", "finetune", "no_load_optim", "no_load_rng", "save_interval"),
    *("use_checkpoint_args", "use_checkpoint_opt_param_scheduler", "enable_hf2mg_convert", "model_type_hf"),
    *("exit_on_missing_checkpoint", "no_save_optim", "no_save_rng"),
)


def shrink_sequence(arguments: Arguments, sizes: Parallel, changes: Changes) -> None:
    """Shrink the sequence to a short one that every rank can have its part of."""
    old = arguments.integer("seq_length", 0)
    if not old:
        return
    split = sizes.tp * sizes.cp if arguments.on("sequence_parallel") else 1
    split = sizes.tp * sizes.cp if arguments.on("sequence_parallel") else 1
    step = lcm(2 * sizes.cp if sizes.cp > 1 else 1, split)
    new = min(old, up_to_multiple(SEQUENCE, step))
    changes.set("seq-length", old, new, f"a multiple of {step}" if step > 1 else "short")
    if arguments.value("position_embedding_type") == "learned_absolute":
        changes.set(
            "max-position-embeddings", arguments.value("max_position_embeddings"), new, "one for each place"
        )
    if new != old:
        changes.lost.append(
            f"attention, and sums of dW, over {old} tokens: now {new} (kernels add long sums in pieces)"
        )


def shrink_batch(arguments: Arguments, old: Parallel, new: Parallel, changes: Changes) -> None:
    """Shrink microbatches and global batch, so that the pipeline is still filled."""
    micro, total = arguments.integer("micro_batch_size", 0), arguments.number("global_batch_size")
    if not micro:
        return
    fewer = min(micro, 2)
    changes.set("micro-batch-size", micro, fewer, "at most two samples")
    before = total // (micro * old.dp) if isinstance(total, int) and micro * old.dp else 1
    least = 2 * new.pp if new.pp > 1 else 2
    microbatches = max(1, min(before, least))
    if new.chunks > 1:
        microbatches = up_to_multiple(microbatches, new.pp)
    if total is not None or new.dp * microbatches > 1:
        changes.set(
            "global-batch-size",
            total,
            fewer * new.dp * microbatches,
            f"{microbatches} microbatches of {fewer} on DP {new.dp}",
        )
    if before > microbatches:
        warmup = " and the steady phase of the pipeline" if new.pp > 1 else ""
        changes.lost.append(f"accumulation over {before} microbatches{warmup}: now {microbatches}")
    ramp = arguments.last("rampup_batch_size")
    if ramp is not None:
        changes.leave_out(ramp.name, " ".join(ramp.values), "the global batch is small from the start")
        changes.lost.append("ramp-up of the batch size")


def shrink_training(arguments: Arguments, changes: Changes) -> None:
    """Make few steps on the same curve of the learning rate, and load nothing of the big model."""
    steps = arguments.number("train_iters")
    if isinstance(steps, int) and steps > STEPS:
        changes.set("train-iters", steps, STEPS, "a few steps")
        if not arguments.has("lr_decay_iters"):
            changes.set("lr-decay-iters", None, steps, "the learning rate keeps its curve")
    if arguments.number("train_samples") is not None:
        changes.lost.append("the curve of the learning rate: it counts samples, and a step has fewer")
    loaded = False
    for setting in _OF_THE_BIG_ONE:
        argument = arguments.last(setting)
        if argument is not None:
            loaded = loaded or setting in ("load", "pretrained_checkpoint")
            changes.leave_out(
                argument.name, " ".join(argument.values) or True, "a checkpoint of another size"
            )
    if loaded:
        changes.lost.append("the weights of the checkpoint: it begins from random ones")


def shrink_vocabulary(arguments: Arguments, vocabulary: int | None, changes: Changes) -> None:
    """Shrink the vocabulary, where that was asked for: the data must fit it."""
    if vocabulary is None:
        return
    for setting in ("vocab_size", "padded_vocab_size"):
        found = arguments.number(setting)
        if isinstance(found, int) and found > vocabulary:
            changes.set(
                setting.replace("_", "-"), found, vocabulary, "as asked: every token must be below it"
            )
            changes.lost.append(
                f"the padding of the vocabulary ({found}), and the sum of the softmax over it"
            )
