"""``pretrain``, ``setup_model_and_optimizer``, ``train``, ``train_step``: Megatron 0.12.1's signatures.

Read against ``megatron/training/training.py`` of Megatron-LM core_v0.12.1. The functions call one another by
their names in this module, so that a patch on one of them is met.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.global_vars import get_args
from megatron.training.initialize import initialize_megatron

from mindspeed_precision.testing.core_loop import weights
from mindspeed_precision.testing.core_loop.adamw import AdamW
from mindspeed_precision.testing.core_loop.data import SequentialSampler, batches
from mindspeed_precision.testing.core_loop.gradients import finalize_model_grads, parameter_groups

StepResult = tuple[dict[str, Any], int, bool, bool, int, Any, Any]


def pretrain(
    train_valid_test_dataset_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    model_type: Any,
    forward_step_func: Callable[..., Any],
    process_non_loss_data_func: Any = None,
    extra_args_provider: Any = None,
    args_defaults: dict[str, Any] | None = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
) -> None:
    """Train a model: initialise, build model and optimizer, read data, make the steps.

    Args:
        train_valid_test_dataset_provider: takes the numbers of samples to train, evaluate and test on, and
            returns three datasets; the last two are not used.
        model_provider: ``(pre_process, post_process) -> model``.
        model_type: megatron-core's ``ModelType``.
        forward_step_func: ``(data_iterator, model) -> (output, loss function)``.
        process_non_loss_data_func: not used, as the five that follow it but ``extra_args_provider`` and
            ``args_defaults``.
        extra_args_provider: adds arguments to the parser.
        args_defaults: values for arguments that are None.
        get_embedding_ranks: not used.
        get_position_embedding_ranks: not used.
        non_loss_data_func: not used.

    Raises:
        ConfigError: the arguments ask for what this loop does not have.
    """
    initialize_megatron(extra_args_provider=extra_args_provider, args_defaults=args_defaults)
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type)
    iterator = _train_iterator(train_valid_test_dataset_provider)
    config = get_model_config(model[0])
    train(
        forward_step_func,
        model,
        optimizer,
        scheduler,
        iterator,
        None,
        process_non_loss_data_func,
        config,
        {},
        non_loss_data_func,
    )


def get_model(model_provider_func: Callable[..., Any], model_type: Any) -> list[Any]:
    """Return this rank's part of the model with its initial weights, in a list of one."""
    args = get_args()
    model = model_provider_func(pre_process=True, post_process=True)
    model.model_type = model_type
    if args.load_weights is not None:
        weights.load([model], args.load_weights)
    else:
        weights.initialise([model], seed=args.seed)
    if args.save_weights is not None:
        weights.save([model], args.save_weights)
    return [model]


def setup_model_and_optimizer(
    model_provider_func: Callable[..., Any],
    model_type: Any,
    no_wd_decay_cond: Any = None,
    scale_lr_cond: Any = None,
    lr_mult: float = 1.0,
    checkpointing_context: Any = None,
) -> tuple[list[Any], Any, Any]:
    """Return ``([model], optimizer, scheduler)``; the arguments after ``model_type`` are not used."""
    args = get_args()
    model = get_model(model_provider_func, model_type)
    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    config = OptimizerConfig(**{name: value for name, value in vars(args).items() if name in names})
    inner = AdamW(
        parameter_groups(model),
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
    )
    optimizer = FP32Optimizer(inner, config, lambda *_: None)
    optimizer.grad_stats_parallel_group = mpu.get_model_parallel_group()
    return model, optimizer, _scheduler(optimizer)


def _scheduler(optimizer: Any) -> Any:
    args = get_args()
    for group in optimizer.param_groups:
        group.update(max_lr=args.lr, min_lr=args.min_lr)
    samples = args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * samples,
        lr_decay_steps=args.lr_decay_iters * samples,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * samples,
        wd_incr_style="constant",
    )


def _train_iterator(provider: Callable[..., Any]) -> Iterator[dict[str, Any]] | None:
    """Return the microbatches of this rank; None where another tensor-parallel rank reads them."""
    args = get_args()
    if mpu.get_tensor_model_parallel_rank() != 0:
        return None
    samples = args.train_iters * args.global_batch_size
    dataset = provider([samples, 0, 0])[0]
    sampler = SequentialSampler(
        samples=samples,
        micro_batch_size=args.micro_batch_size,
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_size=mpu.get_data_parallel_world_size(),
    )
    return batches(dataset, sampler)


def train(
    forward_step_func: Callable[..., Any],
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Any,
    config: Any,
    checkpointing_context: Any,
    non_loss_data_func: Any,
) -> tuple[int, float]:
    """Make ``args.train_iters`` steps; return ``(iteration, 0.0)``: operations are not counted."""
    args = get_args()
    for chunk in model:
        chunk.train()
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    while args.iteration < args.train_iters:
        args.curr_iteration = args.iteration
        start = time.perf_counter()
        losses, skipped, _, _, _, grad_norm, _ = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config
        )
        args.iteration += 1
        args.consumed_train_samples += args.global_batch_size
        if args.iteration % args.log_interval == 0:
            training_log(losses, optimizer.param_groups[0]["lr"], start, skipped, grad_norm)
    return args.iteration, 0.0


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
) -> StepResult:
    """Make one step: every microbatch forward and backward, then clip and update.

    Returns:
        ``(losses, skipped, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros)``; ``losses`` by
        name, each the mean over the step's tokens; ``grad_norm`` before clipping.
    """
    args = get_args()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=None,
        forward_only=False,
    )
    successful, grad_norm, num_zeros = optimizer.step()
    if successful:
        opt_param_scheduler.step(increment=args.global_batch_size)
    return _mean_losses(reports), int(not successful), False, False, 0, grad_norm, num_zeros


def _mean_losses(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each loss as the sum over the step's tokens divided by their number.

    A script reports ``(sum, tokens)``, which it has reduced itself (until 0.12), or a tensor of both, which
    the loop reduces over the data-parallel ranks (from 0.13), or a mean, of which the mean is taken.
    """
    losses = {}
    for name in reports[0]:
        values = [report[name] for report in reports]
        if isinstance(values[0], (tuple, list)):
            losses[name] = sum(value[0] for value in values) / sum(value[1] for value in values)
        elif values[0].numel() == 2:
            both = torch.stack(values).sum(dim=0)
            torch.distributed.all_reduce(both, group=mpu.get_data_parallel_group(with_context_parallel=True))
            losses[name] = both[0] / both[1]
        else:
            losses[name] = sum(values) / len(values)
    return losses


def training_log(
    losses: dict[str, Any], learning_rate: float, start: float, skipped: int, grad_norm: Any
) -> None:
    """Write Megatron's line about a step, with the digits that a comparison needs; on the last rank."""
    args = get_args()
    if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return
    entries = [
        f"iteration {args.iteration:8d}/{args.train_iters:8d}",
        f"consumed samples: {args.consumed_train_samples:12d}",
        f"elapsed time per iteration (ms): {(time.perf_counter() - start) * 1e3:.1f}",
        f"learning rate: {learning_rate:.6E}",
        f"global batch size: {args.global_batch_size:5d}",
        *(f"{name}: {float(value):.9E}" for name, value in losses.items()),
        "loss scale: 1.0",
        *([] if grad_norm is None else [f"grad norm: {float(grad_norm):.9f}"]),
        f"number of skipped iterations: {skipped:3d}",
        "number of nan iterations:   0",
    ]
    sys.stdout.write(" " + " | ".join(entries) + " |\n")
    sys.stdout.flush()
