"""TwinTrainer: the twin's training loop, step by step what Megatron's does on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint

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
    """Trains one twin.

    Args:
        settings: the model and how it is trained.

    Attributes:
        model: the ``GPTModel``.
        optimizer: what ``settings.optimizer`` names.
        step: the next step, from 0.

    Raises:
        ConfigError: the weights' file is another model's, or this MindSpore has no tape.
    """

    def __init__(self, settings: TwinSettings) -> None:
        prepare_mindspore()
        self.settings = settings
        self.step = 0
        self.model = GPTModel(settings)
        self.model.set_train()
        self._load_weights()
        self.optimizer = build_optimizer(list(self.named_parameters().values()), settings)
        self._gradients = WAYS[settings.gradients](self._loss, self.optimizer.parameters)
        samples = settings.steps * settings.microbatches * settings.micro_batch_size
        self._data = ByteSamples(seq_length=settings.seq_length, samples=samples, seed=settings.data_seed)
        length = settings.seq_length
        self._mask = Tensor(np.triu(np.ones((1, 1, length, length), dtype=np.bool_), 1))

    def train(self, steps: int) -> list[TwinStep]:
        """Train ``steps`` more steps."""
        return [self.train_one_step() for _ in range(steps)]

    def train_one_step(self) -> TwinStep:
        """Run one step: forward and backward of all microbatches, clipping, optimizer."""
        settings = self.settings
        losses = [
            self._gradients.add(*self._batch(self.step * settings.microbatches + number))
            for number in range(settings.microbatches)
        ]
        gradients = self._gradients.take()
        norm = _norm(gradients)
        if settings.clip:
            gradients = _clip(gradients, norm, settings.clip)
        rate = learning_rate(settings, self.step)
        set_learning_rate(self.optimizer, rate)
        self.optimizer(gradients)
        loss = float(sum(float(loss.asnumpy()) for loss in losses))  # each is divided by their number
        done = TwinStep(step=self.step, loss=loss, grad_norm=norm, learning_rate=rate)
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

    def _batch(self, number: int) -> tuple[Tensor, ...]:
        batch = self._data.microbatch(number, self.settings.micro_batch_size)
        return tuple(Tensor(batch[key]) for key in ("tokens", "position_ids", "labels", "loss_mask"))

    def _loss(self, tokens: Tensor, position_ids: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """Return the microbatch's share of the step's loss: its mean over the tokens that count."""
        losses = self.model(tokens, position_ids, self._mask, labels=labels)
        counted = loss_mask.reshape(-1)
        loss = mint.sum(losses.reshape(-1) * counted) / mint.sum(counted)
        return loss / self.settings.microbatches


def _norm(gradients: tuple[Tensor, ...]) -> float:
    squares = [float(mint.sum(gradient * gradient).asnumpy()) for gradient in gradients]
    return math.sqrt(sum(squares))


def _clip(gradients: tuple[Tensor, ...], norm: float, largest: float) -> tuple[Tensor, ...]:
    coefficient = largest / (norm + CLIP_EPSILON)
    if coefficient >= 1.0:
        return gradients
    return tuple(gradient * coefficient for gradient in gradients)
