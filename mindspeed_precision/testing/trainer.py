"""A real training loop on ``megatron.core`` alone, on CPUs: as Megatron's own, small enough for a test."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.testing import cpu
from mindspeed_precision.testing.byte_text import ByteWindows
from mindspeed_precision.testing.cpu import fused_wgrad

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EPOCH_OF_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """A model, how it is split, and how it is trained.

    Attributes:
        tp: tensor-parallel size; the data-parallel size is what the other sizes leave of the processes.
        pp: pipeline-parallel size.
        vpp: model chunks per pipeline rank; 1 for no interleaving.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: tensor-parallel size of the experts; None for as many as ``tp``.
        sequence_parallel: split the sequence over the tensor-parallel group outside the parallel linears.
        layers: transformer layers.
        hidden: hidden size; the ffn is four times as wide.
        heads: attention heads.
        kv_groups: groups of heads that share keys and values; None for as many as heads.
        seq_length: tokens per sample.
        micro_batch_size: samples per microbatch.
        microbatches: microbatches per step and data-parallel rank.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        dropout: probability, of hidden and attention dropout.
        experts: experts per layer, two of which serve a token; 0 for a dense model.
        recompute: recompute every layer in the backward pass.
        swiglu: a gated activation, without biases in the linears.
        rmsnorm: RMSNorm instead of LayerNorm.
        padding: rows of the embedding and of the output layer beyond the vocabulary (256 bytes).
        untie: an output layer of its own instead of the embedding's weight.
        distributed_optimizer: shard the optimizer over the data-parallel group.
        overlap: overlap the gradient reduction, and the parameter gather of a distributed optimizer.
        gradient_accumulation_fusion: add dW to main_grad inside the backward pass (by the stand-in).
        lr: learning rate, constant.
        weight_decay: of the parameters that are decayed (matrices).
        adam_eps: Adam's epsilon.
        clip: largest gradient norm; 0 for no clipping.
        frozen: shell patterns of parameter names that are not trained.
        seed: of the weights and of dropout.
        data_seed: of the order of the samples.
        transformer: further fields of Megatron's TransformerConfig.
        ddp: further fields of its DistributedDataParallelConfig.
        optimizer: further fields of its OptimizerConfig.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_groups: int | None = None
    seq_length: int = 32
    micro_batch_size: int = 2
    microbatches: int = 2
    dtype: str = "fp32"
    dropout: float = 0.0
    experts: int = 0
    recompute: bool = False
    swiglu: bool = False
    rmsnorm: bool = False
    padding: int = 0
    untie: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    gradient_accumulation_fusion: bool = False
    lr: float = 1e-3
    weight_decay: float = 0.1
    adam_eps: float = 1e-8
    clip: float = 1.0
    frozen: tuple[str, ...] = ()
    seed: int = 1234
    data_seed: int = 1234
    transformer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> Any:
        """The type of parameters and activations."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step says.

    Attributes:
        step: from 0.
        loss: mean per token over all microbatches and data-parallel ranks; None off the last pipeline stage.
        grad_norm: of all gradients, before clipping; None when the step was skipped (fp16 overflow).
        skipped: True when the optimizer did nothing.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    skipped: bool


class CpuTrainer:
    """Trains one GPT; close it before the next one is made in the same process.

    Without torchrun it is alone (world size 1). The process's generators are seeded anew, so the same
    settings give the same bits.

    Args:
        settings: the model and how it is trained.

    Attributes:
        model: the model chunks of this rank, as Megatron holds them: DistributedDataParallel around GPTModel.
        optimizer: Megatron's.
        config: the TransformerConfig.
        forward_step: what the schedule calls; replace it to see batches and losses.

    Raises:
        ConfigError: the processes do not divide into the parallel sizes.
        PatchError: Megatron was imported without the CPU layer.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        cpu.install()
        torch.set_num_threads(1)
        self.settings = settings
        self.step = 0
        self.forward_step: Callable[..., Any] = self._forward_step
        self._cleanup = ExitStack()
        try:
            self._start_parallelism()
            if settings.gradient_accumulation_fusion:
                self._cleanup.enter_context(fused_wgrad.stand_in())
            self._build()
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> CpuTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def train(self, steps: int, on_step: Callable[[StepResult], None] | None = None) -> list[StepResult]:
        """Train ``steps`` more steps; ``on_step`` is called after each."""
        results = []
        for _ in range(steps):
            result = self.train_one_step()
            results.append(result)
            if on_step:
                on_step(result)
        return results

    def train_one_step(self) -> StepResult:
        """Run one step: forward and backward of all microbatches, reduction, optimizer, schedule."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mindspeed_precision.testing.generations import step_loss

        settings = self.settings
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self._data,
            model=self.model,
            num_microbatches=settings.microbatches,
            seq_length=settings.seq_length,
            micro_batch_size=settings.micro_batch_size,
            decoder_seq_length=settings.seq_length,
            forward_only=False,
        )
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=1)
        result = StepResult(
            step=self.step,
            loss=step_loss(reports),
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=not updated,
        )
        self.step += 1
        return result

    def named_parameters(self) -> dict[str, Any]:
        """Return this rank's parameters by name, after a gather that an overlapped optimizer left open."""
        if self.settings.overlap and self.settings.distributed_optimizer:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        many = len(self.model) > 1
        return {
            f"{f'{number}.' if many else ''}{name}": parameter
            for number, chunk in enumerate(self.model)
            for name, parameter in chunk.module.named_parameters()
        }

    def close(self) -> None:
        """Destroy the parallel state, so that another training can start in this process."""
        self._cleanup.close()

    def _start_parallelism(self) -> None:
        from megatron.core import parallel_state

        settings = self.settings
        if not dist.is_initialized():
            if "RANK" in os.environ:
                dist.init_process_group("gloo")
            else:  # alone: no port is needed
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                self._cleanup.callback(dist.destroy_process_group)
        world, used = dist.get_world_size(), settings.tp * settings.pp * settings.cp
        if world % used:
            raise ConfigError(
                "the processes do not divide into the parallel sizes",
                where="TrainerSettings",
                found=f"{world} processes",
                expected=f"a multiple of tp x pp x cp = {used}",
            )
        parallel_state.initialize_model_parallel(
            settings.tp,
            settings.pp,
            settings.vpp if settings.vpp > 1 else None,
            context_parallel_size=settings.cp,
            expert_model_parallel_size=settings.ep,
            expert_tensor_parallel_size=settings.etp,
        )
        self._cleanup.callback(parallel_state.destroy_model_parallel)

    def _build(self) -> None:
        from megatron.core import parallel_state, tensor_parallel

        from mindspeed_precision.testing import model_building

        settings = self.settings
        seed = settings.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.config = model_building.transformer_config(settings)
        self.model = model_building.build_model(self.config, settings)
        self.optimizer = model_building.build_optimizer(self.model, settings)
        self.scheduler = model_building.build_scheduler(self.optimizer, settings)
        model_building.connect(self.config, self.model, self.optimizer, settings)
        streams = [self._batches() for _ in self.model]  # every chunk sees the same data
        self._data: Any = streams if len(streams) > 1 else streams[0]

    def _batches(self) -> Iterator[dict[str, Any]]:
        from megatron.core import parallel_state

        settings = self.settings
        ranks = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()
        size = settings.micro_batch_size
        samples = EPOCH_OF_STEPS * settings.microbatches * size * ranks
        data = ByteWindows(seq_length=settings.seq_length, samples=samples, seed=settings.data_seed)
        for start in range(rank * size, samples, size * ranks):
            chosen = [data[index] for index in range(start, start + size)]
            yield {key: torch.stack([sample[key] for sample in chosen]) for key in chosen[0]}

    def _forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Any]:
        from mindspeed_precision.testing.generations import loss_report, slice_for_context_parallelism

        batch = slice_for_context_parallelism(next(data_iterator))
        length = self.settings.seq_length
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])

        def loss_func(loss_mask: Any, losses: Any) -> Any:
            counted = loss_mask.view(-1).float()
            return loss_report(torch.sum(losses.view(-1).float() * counted), counted.sum())

        return output, partial(loss_func, batch["loss_mask"])
