"""Faults in a ``CpuTrainer`` as they were found in real trainings, undone when the trainer is closed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

FACTORIES: dict[str, Callable[[Any], None]] = {}


def fault(plant):
    """Register a plant by its name."""
    FACTORIES[plant.__name__] = plant
    return plant


def replaced(trainer, owner, name, value):
    """Set an attribute until the trainer is closed."""
    raw = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    trainer._cleanup.callback(setattr, owner, name, raw)


def inner_optimizers(trainer):
    import torch

    from mindspeed_precision.capture.optimizer_members import members

    return [member for member in members(trainer.optimizer) if isinstance(member, torch.optim.Optimizer)]


def groups(trainer):
    return [group for optimizer in inner_optimizers(trainer) for group in optimizer.param_groups]


def named(trainer):
    return dict(trainer.model[0].module.named_parameters())


def before_step(trainer, step, act):
    """Call ``act`` before a training step."""
    train = trainer.train_one_step

    def one():
        if trainer.step == step:
            act()
        return train()

    trainer.train_one_step = one


def of_linears(trainer, change):
    """Change dW in the backward of parallel linears, after the GEMM."""
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication as Linear

    raw = Linear.backward

    def backward(ctx, grad_output):
        grads = list(raw(ctx, grad_output))
        grads[1] = grads[1] if grads[1] is None else change(grads[1])
        return tuple(grads)

    replaced(trainer, Linear, "backward", staticmethod(backward))


@fault
def nothing(trainer):
    """The healthy twin of all."""


@fault
def twin_of_linears(trainer):
    """Goes through the same wrapper with a dW that stays."""
    of_linears(trainer, lambda wgrad: wgrad * 1)


@fault
def fc1_doubled(trainer):
    wide = 4 * trainer.settings.hidden
    of_linears(trainer, lambda wgrad: wgrad * 2 if wgrad.shape[0] == wide else wgrad)


@fault
def rounded_to_bf16(trainer):
    of_linears(trainer, lambda wgrad: wgrad.bfloat16().to(wgrad.dtype))


@fault
def fused_twice(trainer):
    module = sys.modules["fused_weight_gradient_mlp_cuda"]
    once = module.wgrad_gemm_accum_fp32

    def twice(total_input, grad_output, main_grad):
        for _ in range(2 if main_grad.shape[0] == 4 * trainer.settings.hidden else 1):
            once(total_input, grad_output, main_grad)

    replaced(trainer, module, "wgrad_gemm_accum_fp32", twice)


@fault
def buffer_not_zeroed(trainer):
    for chunk in trainer.model:
        chunk.zero_grad_buffer = lambda: None


@fault
def doubled_after_each_backward(trainer):
    import megatron.core.pipeline_parallel.schedules as schedules

    raw = schedules.backward_step

    def backward_step(*args, **kwargs):
        result = raw(*args, **kwargs)
        for name, parameter in named(trainer).items():
            if ".mlp." in name:
                parameter.main_grad.mul_(2)
        return result

    replaced(trainer, schedules, "backward_step", backward_step)


@fault
def mlp_detached(trainer):
    mlp = named_modules(trainer)["decoder.layers.1.mlp"]
    forward = mlp.forward

    def detached(*args, **kwargs):
        output, bias = forward(*args, **kwargs)
        return output.detach(), None if bias is None else bias.detach()

    mlp.forward = detached


def named_modules(trainer):
    return dict(trainer.model[0].module.named_modules())


@fault
def step_begins_at_1(trainer):
    import torch

    kind = torch.optim.Adam  # AdamW inherits it
    raw = kind._init_group

    def init_group(self, group, *args, **kwargs):
        fresh = [p for p in group["params"] if p.grad is not None and not self.state[p]]
        found = raw(self, group, *args, **kwargs)
        for parameter in fresh:
            self.state[parameter]["step"] += 1
        return found

    replaced(trainer, kind, "_init_group", init_group)


@fault
def norms_decayed(trainer):
    for group in groups(trainer):
        group["wd_mult"] = 1.0
        group["weight_decay"] = trainer.settings.weight_decay


@fault
def beta2_of_the_class(trainer):
    for group in groups(trainer):
        group["betas"] = (0.9, 0.95)


@fault
def eps_of_the_class(trainer):
    for group in groups(trainer):
        group["eps"] = 1e-5


@fault
def state_lost(trainer):
    def clear():
        for optimizer in inner_optimizers(trainer):
            optimizer.state.clear()

    before_step(trainer, 2, clear)


@fault
def schedule_twice(trainer):
    before_step(trainer, 1, lambda: trainer.scheduler.step(increment=1))


@fault
def rate_set_by_hand(trainer):
    def set_by_hand():
        for group in groups(trainer):
            group["lr"] *= 0.9

    before_step(trainer, 1, set_by_hand)


@fault
def count_off(trainer):
    """What a checkpoint that is loaded twice leaves: the schedule is one step ahead of the optimizer."""
    trainer.scheduler.step(increment=1)


@fault
def not_averaged(trainer):
    for buffer in trainer.model[0].buffers:
        for bucket in buffer.buckets:
            bucket.gradient_scaling_factor = 1.0


@fault
def not_waited_for(trainer):
    for group in trainer.model[0].bucket_groups:
        group.start_grad_sync = group.finish_grad_sync = lambda *args, **kwargs: None


@fault
def copies_in_the_norm(trainer):
    import megatron.core.tensor_parallel as tensor_parallel

    everything = lambda *args, **kwargs: True  # noqa: E731
    replaced(trainer, tensor_parallel, "param_is_not_tensor_parallel_duplicate", everything)


@fault
def norm_of_one_rank(trainer):
    import megatron.core.optimizer.optimizer as optimizer

    def local(grads, norm_type=2, grad_stats_parallel_group=None):
        return float(sum((grad.float() ** 2).sum() for grad in grads) ** 0.5)

    replaced(trainer, optimizer, "get_grad_norm_fp32", local)


@fault
def embedding_not_reduced(trainer):
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    replaced(trainer, module, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)


@fault
def norms_not_reduced(trainer):
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    replaced(trainer, module, "_allreduce_non_tensor_model_parallel_grads", lambda *args, **kwargs: None)


@fault
def clipped_by_half(trainer):
    import megatron.core.optimizer.optimizer as optimizer

    raw = optimizer.clip_grad_by_total_norm_fp32

    def clip(parameters, max_norm, total_norm, *args, **kwargs):
        return raw(parameters, max_norm / 2, total_norm, *args, **kwargs)

    replaced(trainer, optimizer, "clip_grad_by_total_norm_fp32", clip)


@contextmanager
def decaying():
    """Build trainers with a schedule that moves: warmup, then a cosine, and weight decay that grows."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from mindspeed_precision.testing import model_building

    def build(optimizer, settings):
        return OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.lr / 10,
            lr_warmup_steps=2,
            lr_decay_steps=6,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=settings.weight_decay,
            wd_incr_steps=6,
            wd_incr_style="linear",
        )

    raw, model_building.build_scheduler = model_building.build_scheduler, build
    try:
        yield
    finally:
        model_building.build_scheduler = raw
