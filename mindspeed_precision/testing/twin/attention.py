"""Self-attention as Megatron's local spec builds it, with the way to take q, k and v apart to choose."""

from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor, mint, nn

from mindspeed_precision.testing.twin.linear import ColumnParallelLinear, RowParallelLinear
from mindspeed_precision.testing.twin.settings import TwinSettings

MASKED = -10000.0


class IdentityOp(nn.Cell):
    """Returns its first argument: where Megatron has a module that does nothing."""

    def construct(self, value: Tensor, **_: object) -> Tensor:
        """Return ``value``."""
        return value


class FusedScaleMaskSoftmax(nn.Cell):
    """Megatron's softmax over masked scores, in its unfused form."""

    def construct(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Return probabilities ``[b, np, s, s]``; where ``mask`` is True there is nothing to attend to."""
        return mint.nn.functional.softmax(scores.masked_fill(mask, MASKED), dim=-1)


class DotProductAttention(nn.Cell):
    """Attention proper: it receives q, k and v ``[s, b, np, hn]`` each, as Megatron's does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_mask_softmax = FusedScaleMaskSoftmax()
        self.attention_dropout = IdentityOp()

    def construct(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the context ``[s, b, np·hn]``."""
        length, batch, heads, size = query.shape
        query = query.reshape(length, batch * heads, size)
        key = key.reshape(length, batch * heads, size)
        scores = mint.bmm(mint.transpose(query, 0, 1), mint.transpose(mint.transpose(key, 0, 1), 1, 2))
        scores = (scores * (1.0 / math.sqrt(size))).reshape(batch, heads, length, length)
        probabilities = self.attention_dropout(self.scale_mask_softmax(scores, attention_mask))
        value = value.reshape(length, batch * heads, size)
        probabilities = probabilities.reshape(batch * heads, length, length)
        context = mint.bmm(probabilities, mint.transpose(value, 0, 1)).reshape(batch, heads, length, size)
        return mint.permute(context, (2, 0, 1, 3)).contiguous().reshape(length, batch, heads * size)


class SelfAttention(nn.Cell):
    """Projection to q, k and v, rotation, attention, projection back."""

    def __init__(self, settings: TwinSettings) -> None:
        super().__init__()
        hidden, transposed = settings.hidden, settings.wgrad == "transposed"
        self.core_attention = DotProductAttention()
        self.linear_proj = RowParallelLinear(
            hidden, hidden, skip_bias_add=not settings.bias_inside, transposed_wgrad=transposed
        )
        self.linear_qkv = ColumnParallelLinear(hidden, 3 * hidden, transposed_wgrad=transposed)
        self.q_layernorm = IdentityOp()
        self.k_layernorm = IdentityOp()
        self.heads = settings.heads
        self.head_size = hidden // settings.heads
        self.split = settings.split

    def construct(
        self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[s, b, h]``, and the bias where the caller is to add it."""
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        if rotary_pos_emb is not None:
            query = apply_rotary_pos_emb(query, rotary_pos_emb)
            key = apply_rotary_pos_emb(key, rotary_pos_emb)
        return self.linear_proj(self.core_attention(query, key, value, attention_mask))

    def get_query_key_value_tensors(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, ``[s, b, np, hn]`` each."""
        length, batch, _ = hidden_states.shape
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = mixed.reshape(length, batch, self.heads, 3 * self.head_size)
        if self.split == "split":
            query, key, value = mint.split(mixed, self.head_size, dim=3)
        else:
            query, key, value = mint.chunk(mixed, 3, dim=3)
        return self.q_layernorm(query), self.k_layernorm(key), value


class RotaryEmbedding(nn.Cell):
    """Angles of the rotary position embedding: Megatron's, for base 10000 over the whole head.

    They are constants, made with numpy: the CPU backend has no kernel for ``arange``.
    """

    def __init__(self, head_size: int) -> None:
        super().__init__()
        exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
        self.inv_freq = np.float32(1.0) / np.float32(10000.0) ** exponents

    def construct(self, length: int) -> Tensor:
        """Return the angles ``[s, 1, 1, hn]`` for positions ``0 … length − 1``."""
        angles = np.outer(np.arange(length, dtype=np.float32), self.inv_freq)
        return Tensor(np.concatenate((angles, angles), axis=-1).reshape(length, 1, 1, -1))


def apply_rotary_pos_emb(tensor: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + hn/2)`` of ``tensor`` ``[s, b, np, hn]`` by ``angles`` ``[s, 1, 1, hn]``."""
    first, second = mint.chunk(tensor, 2, dim=-1)
    rotated = mint.cat((-second, first), dim=-1)
    return (tensor * mint.cos(angles)) + (rotated * mint.sin(angles))
