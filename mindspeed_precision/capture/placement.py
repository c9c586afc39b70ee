"""Where each parameter of this rank sits in the canonical one, from Megatron's own attributes.

Megatron marks what is split over the tensor-parallel group (``tensor_model_parallel``, ``partition_dim``,
``partition_stride``). Rank r of n holds the r-th part of each of the ``partition_stride`` equal pieces along
``partition_dim``. What the attributes do not say is said here:

- a gated MLP's first linear has a stride of 2 (gate, then the other half) also where the attribute says 1
  (before 0.16);
- fused query, key and value are ordered by query group, and groups are split without interleaving: stride 1;
- a weight of Mamba holds several things of which each is split: ``partition_sizes`` (from 0.17) says how long
  they are on a rank;
- of grouped experts Transformer Engine's linears have a weight for each, which is split as a linear's of one
  expert is, and does not say that it is (``TEGroupedLinear`` in megatron.core.extensions.transformer_engine);
- ``GroupedMLP`` (until 0.16) has all experts of a rank in one weight, in an order that is none along a
  dimension: where ranks have other experts it has no placement, and is not compared;
- a linear of any other name may hold several things in one weight: it has none either.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from mindspeed_precision.backends.base import PlacingBackend
from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.capture.names import Names
from mindspeed_precision.record.placement import EMBEDDING_GROUP, TENSOR_GROUP, joined
from mindspeed_precision.records import Placement, RankCoordinates, Split

_PLAIN = re.compile(
    r"(?:.*\.)?(?:linear_qkv|linear_proj|linear_fc1|linear_fc2|linear_q|linear_kv|linear_q_proj|linear_q_down_proj"
    r"|linear_q_up_proj|linear_kv_down_proj|linear_kv_up_proj|word_embeddings|output_layer)\.(?:weight|bias)"
    r"|(?:.*\.)?mixer\.(?:out_proj\.weight|dt_bias|A_log|D|norm\.weight)"
)
"""Parameters of which it is known what they hold."""

_GROUPED = re.compile(r".*\.experts\.(linear_fc[12])\.(weight|bias)\d+")
_IN_ONE = re.compile(r".*\.experts\.weight[12]")
_FIRST_OF_MLP = re.compile(r"(.*)\.linear_fc1\.\w+")
_NORMS_OF_HEADS = re.compile(r".*\.[qk]_layernorm\.\w+")
_OF_SOME_TOKENS = re.compile(
    r"(?:.*\.)?(?:(?:input|pre_mlp|pre_cross_attn|final|post_attention|post_mlp)_?layernorm\.\w+"
    r"|layer_norm_(?:weight|bias)|(?:self_attention\.linear_proj|mlp\.linear_fc2)\.bias)"
)
"""What sequence parallelism shows a part of the tokens, marked so or not: a missing mark is a fault, too."""


def placements(
    backend: CaptureBackend, names: Names, coordinates: RankCoordinates
) -> dict[str, Placement | None]:
    """Return by canonical name where each parameter of this rank sits; None where that is not known.

    Empty where the backend cannot number a shard's elements.
    """
    if not isinstance(backend, PlacingBackend):
        return {}
    modules = dict(names.modules)
    return {
        fqn: _placement(fqn, parameter, modules, coordinates, names) for fqn, parameter in names.parameters
    }


def _placement(
    fqn: str, parameter: Any, modules: dict[str, Any], coordinates: RankCoordinates, names: Names
) -> Placement | None:
    size, rank = _tensor_group(modules.get(fqn.rpartition(".")[0]), coordinates)
    shape = tuple(int(length) for length in parameter.shape)
    if _IN_ONE.fullmatch(fqn):
        return None if size > 1 or coordinates.ep_size > 1 else Placement(shape=shape)
    grouped = _GROUPED.fullmatch(fqn)
    if grouped is not None:
        return _grouped(grouped, shape, size, rank, gated=_stride(fqn, parameter, modules) > 1)
    split = size > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
    tied = coordinates.pp_size > 1 and bool(getattr(parameter, "shared_embedding", False))
    copy_of = "embedding.word_embeddings.weight" if tied and fqn == "output_layer.weight" else ""
    if not split:
        partial = _partial(fqn, parameter, names, coordinates)
        return Placement(shape=shape, partial=EMBEDDING_GROUP if tied else partial, copy_of=copy_of)
    dim, stride = int(parameter.partition_dim), _stride(fqn, parameter, modules)
    several = tuple(int(length) for length in getattr(parameter, "partition_sizes", ()))
    if several:
        return _of_several(shape, dim, several, size, rank) if sum(several) == shape[dim] else None
    if not _PLAIN.fullmatch(fqn) or not 0 <= dim < len(shape) or shape[dim] % stride:
        return None
    held = shape[dim] // stride
    return Placement(
        shape=(*shape[:dim], shape[dim] * size, *shape[dim + 1 :]),
        splits=(Split(dim=dim, blocks=joined([((n * size + rank) * held, held) for n in range(stride)])),),
        partial=EMBEDDING_GROUP if tied else "",
        copy_of=copy_of,
    )


def _of_several(
    shape: tuple[int, ...], dim: int, lengths: tuple[int, ...], size: int, rank: int
) -> Placement:
    """Place a tensor that holds, one after another, its rank's part of each of several things."""
    starts = [size * sum(lengths[:number]) for number in range(len(lengths))]
    blocks = [
        (start + rank * length, length) for start, length in zip(starts, lengths, strict=True) if length
    ]
    whole = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
    return Placement(shape=whole, splits=(Split(dim=dim, blocks=joined(blocks)),))


def _grouped(
    name: re.Match[str], shape: tuple[int, ...], size: int, rank: int, *, gated: bool
) -> Placement | None:
    """Place the weight or bias of one of several experts: of the first linear by columns, then by rows."""
    first = name.group(1) == "linear_fc1"
    if size == 1 or (not first and name.group(2) == "bias"):
        return Placement(shape=shape)
    dim, pieces = (0, 2 if gated else 1) if first else (1, 1)
    if shape[dim] % pieces:
        return None
    return _of_several(shape, dim, (shape[dim] // pieces,) * pieces, size, rank)


def _tensor_group(owner: Any, coordinates: RankCoordinates) -> tuple[int, int]:
    """Return size and rank of the group that a module's parameters are split over; experts have their own."""
    return (
        expert_tensor_group(coordinates) if _of_experts(owner) else (coordinates.tp_size, coordinates.tp_rank)
    )


def expert_tensor_group(coordinates: RankCoordinates) -> tuple[int, int]:
    """Return size and rank of the group that an expert is split over: else the tensor-parallel one."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if hasattr(state, "get_expert_tensor_parallel_world_size"):
        return state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()
    return coordinates.tp_size, coordinates.tp_rank


def _of_experts(owner: Any) -> bool:
    kinds = {kind.__name__ for kind in type(owner).__mro__}
    return bool(getattr(owner, "is_expert", False)) or bool(kinds & {"TEGroupedLinear", "GroupedMLP"})


def _stride(fqn: str, parameter: Any, modules: dict[str, Any]) -> int:
    stride = int(getattr(parameter, "partition_stride", 1))
    first = _FIRST_OF_MLP.fullmatch(fqn)
    config = getattr(modules.get(first.group(1)), "config", None) if first else None
    return max(stride, 2) if getattr(config, "gated_linear_unit", False) else stride


def _partial(fqn: str, parameter: Any, names: Names, coordinates: RankCoordinates) -> str:
    """Say over which group the gradient of a replicated parameter is a sum: each rank sees some tokens."""
    config = getattr(names.roots[0], "config", None) if names.roots else None
    if coordinates.tp_size == 1 or config is None:
        return ""
    marked = getattr(parameter, "sequence_parallel", False) or _OF_SOME_TOKENS.fullmatch(fqn)
    tokens = getattr(config, "sequence_parallel", False) and marked
    heads = getattr(config, "qk_layernorm", False) and _NORMS_OF_HEADS.fullmatch(fqn)
    return TENSOR_GROUP if tokens or heads else ""
