"""GPTModel of the twin: module paths and parameter names are those of Megatron's local spec."""

from __future__ import annotations

import math

from mindspore import Parameter, Tensor, mint, nn, ops

from mindspeed_precision.testing.byte_samples import BYTE_VALUES
from mindspeed_precision.testing.twin.attention import IdentityOp, RotaryEmbedding, SelfAttention
from mindspeed_precision.testing.twin.cross_entropy import vocab_parallel_cross_entropy
from mindspeed_precision.testing.twin.linear import ColumnParallelLinear, RowParallelLinear
from mindspeed_precision.testing.twin.settings import TwinSettings

LAYERNORM_EPSILON = 1e-5


class LayerNorm(nn.Cell):
    """Layer normalisation over the last dimension, by the kernel that a CPU has."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = Parameter(mint.ones((hidden,)), name="weight")
        self.bias = Parameter(mint.zeros((hidden,)), name="bias")
        self.kernel = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=LAYERNORM_EPSILON)

    def construct(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised ``hidden_states`` ``[s, b, h]``."""
        return self.kernel(hidden_states, self.weight, self.bias)[0]


class Embedding(nn.Cell):
    """A table of ``count`` vectors."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.weight = Parameter(mint.zeros((count, hidden)), name="weight")

    def construct(self, indices: Tensor) -> Tensor:
        """Return the rows ``[b, s, h]`` of ``indices`` ``[b, s]``."""
        return ops.gather(self.weight, indices, 0)


class LanguageModelEmbedding(nn.Cell):
    """Embedding of tokens, and of positions where they are learned."""

    def __init__(self, settings: TwinSettings) -> None:
        super().__init__()
        self.word_embeddings = Embedding(BYTE_VALUES, settings.hidden)
        learned = settings.positions == "learned_absolute"
        self.position_embeddings = Embedding(settings.seq_length, settings.hidden) if learned else None
        self.embedding_dropout = IdentityOp()

    def construct(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the embeddings ``[s, b, h]`` of ids ``[b, s]``."""
        embeddings = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            embeddings = embeddings + self.position_embeddings(position_ids)
        return self.embedding_dropout(mint.transpose(embeddings, 0, 1).contiguous())


class MLP(nn.Cell):
    """Two linears with the exact GELU between them."""

    def __init__(self, settings: TwinSettings) -> None:
        super().__init__()
        hidden, ffn = settings.hidden, 4 * settings.hidden
        skip, transposed = not settings.bias_inside, settings.wgrad == "transposed"
        self.linear_fc1 = ColumnParallelLinear(hidden, ffn, skip_bias_add=skip, transposed_wgrad=transposed)
        self.linear_fc2 = RowParallelLinear(ffn, hidden, skip_bias_add=skip, transposed_wgrad=transposed)

    def construct(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[s, b, h]``, and the bias where the caller is to add it."""
        intermediate = _add_bias(*self.linear_fc1(hidden_states))
        return self.linear_fc2(intermediate * 0.5 * (1.0 + mint.erf(intermediate * math.sqrt(0.5))))


class TransformerLayer(nn.Cell):
    """Attention and MLP, each after a normalisation and beside a residual."""

    def __init__(self, settings: TwinSettings) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(settings.hidden)
        self.self_attention = SelfAttention(settings)
        self.pre_cross_attn_layernorm = IdentityOp()
        self.cross_attention = IdentityOp()
        self.pre_mlp_layernorm = LayerNorm(settings.hidden)
        self.mlp = MLP(settings)

    def construct(
        self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the new hidden states ``[s, b, h]``, and None, where Megatron has a context."""
        output, bias = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        hidden_states = _add_bias(output, bias) + hidden_states
        hidden_states = self.cross_attention(self.pre_cross_attn_layernorm(hidden_states))
        output, bias = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return _add_bias(output, bias) + hidden_states, None


class TransformerBlock(nn.Cell):
    """All layers, and the normalisation after them."""

    def __init__(self, settings: TwinSettings) -> None:
        super().__init__()
        self.layers = nn.CellList([TransformerLayer(settings) for _ in range(settings.layers)])
        self.final_layernorm = LayerNorm(settings.hidden)

    def construct(
        self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states ``[s, b, h]``."""
        for layer in self.layers:
            hidden_states, _ = layer(
                hidden_states=hidden_states, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
            )
        return self.final_layernorm(hidden_states)


class GPTModel(nn.Cell):
    """A GPT that returns the loss of each token.

    Args:
        settings: sizes and variants; see ``TwinSettings``.
    """

    def __init__(self, settings: TwinSettings) -> None:
        super().__init__()
        self.embedding = LanguageModelEmbedding(settings)
        rope = settings.positions == "rope"
        self.rotary_pos_emb = RotaryEmbedding(settings.hidden // settings.heads) if rope else None
        self.decoder = TransformerBlock(settings)
        self.output_layer = ColumnParallelLinear(
            settings.hidden,
            BYTE_VALUES,
            bias=False,
            own_weight=settings.untie,
            transposed_wgrad=settings.wgrad == "transposed",
        )
        self.untie = settings.untie

    def construct(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the losses ``[b, s]``.

        Args:
            input_ids: int64 ``[b, s]``.
            position_ids: int64 ``[b, s]``.
            attention_mask: bool ``[1, 1, s, s]``, True where attention is not allowed.
            labels: int64 ``[b, s]``.
        """
        hidden_states = self.embedding(input_ids=input_ids, position_ids=position_ids)
        rotary_pos_emb = None if self.rotary_pos_emb is None else self.rotary_pos_emb(input_ids.shape[1])
        hidden_states = self.decoder(
            hidden_states=hidden_states, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        shared = None if self.untie else self.embedding.word_embeddings.weight
        logits, _ = self.output_layer(hidden_states, weight=shared)
        losses = vocab_parallel_cross_entropy(logits, mint.transpose(labels, 0, 1).contiguous())
        return mint.transpose(losses, 0, 1).contiguous()


def _add_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    return output if bias is None else output + bias
