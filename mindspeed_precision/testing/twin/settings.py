"""What the twin trains, and which of its variants."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from mindspeed_precision.errors import ConfigError

CHOICES = {
    "positions": ("rope", "learned_absolute"),
    "split": ("chunk", "split"),
    "wgrad": ("contiguous", "transposed"),
    "gradients": ("tape", "value_and_grad"),
    "optimizer": ("adamw", "experimental.adamw", "mint.adam", "mint.sgd"),
}


@dataclass(frozen=True, kw_only=True)
class TwinSettings:
    """A model and how it is trained; the defaults are those of the demo's ``pretrain_gpt.py``.

    Attributes:
        layers: transformer layers.
        hidden: hidden size; the ffn is four times as wide.
        heads: attention heads.
        seq_length: tokens per sample.
        micro_batch_size: samples per microbatch.
        microbatches: microbatches per step.
        steps: how many there are: the learning rate decays over them.
        positions: ``rope`` or ``learned_absolute``.
        untie: an output layer of its own instead of the embedding's weight.
        split: how q, k and v are taken apart: ``mint.chunk``, or ``mint.split``, whose backward pass is
            wrong on the CPU in some releases (``defects.split_ignores_strides``).
        wgrad: layout of dW as the linears' backward pass returns it: ``contiguous``, as Megatron's product
            gives it, or ``transposed``, the same bits as a transposed view.
        bias_inside: linears add their bias themselves, as MindSpore's ``nn.Dense`` does, where Megatron
            returns it beside an output without it (``skip_bias_add``).
        gradients: ``tape``, which accumulates over microbatches, or ``value_and_grad``.
        optimizer: ``adamw`` (``optimizer.AdamW``), ``experimental.adamw`` (MindSpore's, works),
            ``mint.adam`` or ``mint.sgd`` (MindSpore's, leave parameters as they are on a CPU; the Adam of
            2.7.1 has no kernel for weight decay and says so).
        lr: learning rate at its highest.
        min_lr: what it decays to by a cosine; None for a constant rate.
        weight_decay: of matrices; biases and normalisations are not decayed, as in Megatron.
        betas: Adam's.
        adam_eps: Adam's epsilon.
        clip: largest gradient norm; 0 for no clipping.
        seed: of the initial weights.
        data_seed: of the order of the samples.
        weights: safetensors file with the initial weights, instead of the seed's.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    seq_length: int = 32
    micro_batch_size: int = 2
    microbatches: int = 4
    steps: int = 5
    positions: str = "rope"
    untie: bool = False
    split: str = "chunk"
    wgrad: str = "contiguous"
    bias_inside: bool = False
    gradients: str = "tape"
    optimizer: str = "adamw"
    lr: float = 1e-3
    min_lr: float | None = 1e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    clip: float = 1.0
    seed: int = 1234
    data_seed: int = 1234
    weights: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what no twin can be built from.

        Raises:
            ConfigError: an unknown choice, a size that is not positive, or heads that do not divide.
        """
        object.__setattr__(self, "betas", tuple(self.betas))
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = CHOICES.get(field.name)
            if allowed and value not in allowed:
                raise ConfigError(
                    "unknown choice", where=field.name, found=repr(value), expected=" or ".join(allowed)
                )
            if type(value) is int and value < 1 and "seed" not in field.name:
                raise ConfigError("must be positive", where=field.name, found=str(value))
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                "the heads do not divide the hidden size into even parts",
                where="heads",
                found=f"{self.hidden} / {self.heads}",
                expected="a multiple of 2",
            )
