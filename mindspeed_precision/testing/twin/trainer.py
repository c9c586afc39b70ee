"""TwinTrainer: the twin's training loop, step by step what Megatron's does on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, dtype, mint

from mindspeed_precision.testing.byte_samples import ByteSamples
from mindspeed_precision.testing.initial_weights import Weights, initial_weights, load_weights
from mindspeed_precision.testing.twin.gradients import WAYS
from mindspeed_precision.testing.twin.model import GPTModel
from mindspeed_precision.testing.twin.optimizer import build_optimizer, learning_rate, set_learning_rate
from mindspeed_precision.testing.twin.settings import TwinSettings

CLIP_EPSILON = 1e-6  # Megatron's, in clip_grad_by_total_norm_fp32


@dataclass(frozen=True, kw_only=True)
class TwinStep:
    """What a step says.

    Attributes:
        step: from 0.
        loss: mean per token over all microbatches.
        grad_norm: of all gradients, before clipping.
        learning_rate: that the optimizer was given.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float


def prepare_mindspore() -> None:
    """Put MindSpore into the state that the twin needs: PyNative on the CPU, one operation after the other.

    Without ``launch_blocking`` an error surfaces at a later, unrelated operation. ``set_deterministic`` is
    left to whoever debugs the run: it changes nothing on a CPU and may be called once per process.
    """
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    mindspore.set_device("CPU")
    mindspore.runtime.launch_blocking()


class TwinTrainer:
    """Trains one twin. The framework's, Python's and numpy's generators are seeded.

    Args:
        settings: the model and how it is trained.

    Attributes:
        model: the ``GPTModel``.
        optimizer: what ``settings.optimizer`` names.
        forward_step: as Megatron's schedules call it, ``(data_iterator, model) -> (losses, loss_func)``;
            replace it to see batches and losses.
        step: the next step, from 0.

    Raises:
        ConfigError: the weights' file is another model's, or this MindSpore has no tape.
    """

    def __init__(self, settings: TwinSettings) -> None:
        prepare_mindspore()
        mindspore.set_seed(settings.seed)
        mindspore.manual_seed(settings.seed)  # the default generator: set_seed does not reach it in 2.7.1
        self.settings = settings
        self.step = 0
        self.forward_step: Callable[..., Any] = self._forward_step
        self.model = GPTModel(settings)
        self.model.set_train()
        self._load_weights()
        self.optimizer = build_optimizer(list(self.named_parameters().values()), settings)
        self._gradients = WAYS[settings.gradients](self._scaled_loss, self.optimizer.parameters)
        self._data = self._batches()
        self._reports: list[tuple[Tensor, Tensor]] = []
        length = settings.seq_length
        self._mask = Tensor(np.triu(np.ones((1, 1, length, length), dtype=np.bool_), 1))

    def train(self, steps: int) -> list[TwinStep]:
        """Train ``steps`` more steps."""
        return [self.train_one_step() for _ in range(steps)]

    def train_one_step(self) -> TwinStep:
        """Run one step: forward and backward of all microbatches, clipping, optimizer."""
        settings = self.settings
        self._reports.clear()
        self._gradients.clear()
        for _ in range(settings.microbatches):
            self._gradients.add()
        gradients = self._gradients.take()
        norm = _norm(gradients)
        if settings.clip:
            gradients = _clip(gradients, norm, settings.clip)
        rate = learning_rate(settings, self.step)
        set_learning_rate(self.optimizer, rate)
        self.optimizer(gradients)
        done = TwinStep(step=self.step, loss=self._mean_loss(), grad_norm=norm, learning_rate=rate)
        self.step += 1
        return done

    def named_parameters(self) -> dict[str, Any]:
        """Return the trainable parameters by Megatron's names."""
        return {parameter.name: parameter for parameter in self.model.trainable_params()}

    def host_parameters(self) -> Weights:
        """Return copies of the trainable parameters as float32 arrays, by Megatron's names."""
        # asnumpy() shares memory with the parameter on a CPU
        return {name: parameter.asnumpy().copy() for name, parameter in self.named_parameters().items()}

    def _load_weights(self) -> None:
        parameters = self.named_parameters()
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        path = self.settings.weights
        weights = load_weights(path, shapes) if path else initial_weights(shapes, self.settings.seed)
        for name, parameter in parameters.items():
            parameter.set_data(Tensor(weights[name]))

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the microbatches in the order of Megatron's sequential sampler, ``[b, s]`` each."""
        settings = self.settings
        count = settings.steps * settings.microbatches
        data = ByteSamples(
            seq_length=settings.seq_length,
            samples=count * settings.micro_batch_size,
            seed=settings.data_seed,
        )
        for number in range(count):
            arrays = data.microbatch(number, settings.micro_batch_size)
            yield {key: Tensor(array) for key, array in arrays.items()}

    def _forward_step(self, data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(data_iterator)
        losses = model(batch["tokens"], batch["position_ids"], self._mask, labels=batch["labels"])
        return losses, partial(_loss_func, batch["loss_mask"])

    def _scaled_loss(self) -> Tensor:
        """Run one microbatch forward; return its share of the step's loss, which is differentiated."""
        losses, loss_func = self.forward_step(self._data, self.model)
        loss, tokens, report = loss_func(losses)
        self._reports.append(report["lm loss"])
        return loss / tokens / self.settings.microbatches

    def _mean_loss(self) -> float:
        """Return the step's loss per token, as the log prints it."""
        totals = np.array([[float(part.asnumpy()) for part in report] for report in self._reports])
        return float(totals[:, 0].sum() / totals[:, 1].sum())


def _loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the loss summed over the tokens that count, their number, and both for the log."""
    counted = loss_mask.reshape(-1)
    loss, tokens = mint.sum(losses.reshape(-1) * counted), mint.sum(counted)
    return loss, tokens.astype(dtype.int32), {"lm loss": (loss, tokens)}


def _norm(gradients: tuple[Tensor, ...]) -> float:
    squares = [float(mint.sum(gradient * gradient).asnumpy()) for gradient in gradients]
    return math.sqrt(sum(squares))


def _clip(gradients: tuple[Tensor, ...], norm: float, largest: float) -> tuple[Tensor, ...]:
    coefficient = largest / (norm + CLIP_EPSILON)
    if coefficient >= 1.0:
        return gradients
    return tuple(gradient * coefficient for gradient in gradients)
