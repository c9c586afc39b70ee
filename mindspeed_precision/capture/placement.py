"""Where each parameter of this rank sits in the canonical one, from Megatron's own attributes.

Megatron marks what is split over the tensor-parallel group (``tensor_model_parallel``, ``partition_dim``,
``partition_stride``). Rank r of n holds the r-th part of each of the ``partition_stride`` equal pieces along
``partition_dim``. What the attributes do not say is said here:

- a gated MLP's first linear has a stride of 2 (gate, then the other half) also where the attribute says 1
  (before 0.16);
- fused query, key and value are ordered by query group, and groups are split without interleaving: stride 1;
- a linear of any other name may hold several things in one weight: it has no placement, and is not compared.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from mindspeed_precision.backends.base import PlacingBackend
from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.capture.names import Names
from mindspeed_precision.record.placement import EMBEDDING_GROUP, TENSOR_GROUP
from mindspeed_precision.records import Placement, RankCoordinates, Split

_PLAIN = re.compile(
    r"(?:.*\.)?(?:linear_qkv|linear_proj|linear_fc1|linear_fc2|linear_q|linear_kv|linear_q_proj|linear_q_up_proj"
    r"|linear_kv_up_proj|word_embeddings|output_layer)\.(?:weight|bias)"
)
"""Parameters of which it is known what they hold."""

_FIRST_OF_MLP = re.compile(r"(.*)\.linear_fc1\.\w+")
_NORMS_OF_HEADS = re.compile(r".*\.[qk]_layernorm\.\w+")


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
    split = size > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
    tied = coordinates.pp_size > 1 and bool(getattr(parameter, "shared_embedding", False))
    copy_of = "embedding.word_embeddings.weight" if tied and fqn == "output_layer.weight" else ""
    if not split:
        partial = _partial(fqn, parameter, names, coordinates)
        return Placement(shape=shape, partial=EMBEDDING_GROUP if tied else partial, copy_of=copy_of)
    dim, stride = int(parameter.partition_dim), _stride(fqn, parameter, modules)
    if not _PLAIN.fullmatch(fqn) or not 0 <= dim < len(shape) or shape[dim] % stride:
        return None
    held = shape[dim] // stride
    return Placement(
        shape=(*shape[:dim], shape[dim] * size, *shape[dim + 1 :]),
        splits=(Split(dim=dim, blocks=_joined([((n * size + rank) * held, held) for n in range(stride)])),),
        partial=EMBEDDING_GROUP if tied else "",
        copy_of=copy_of,
    )


def _joined(blocks: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join blocks that follow each other."""
    joined = [blocks[0]]
    for offset, length in blocks[1:]:
        if sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return tuple(joined)


def _tensor_group(owner: Any, coordinates: RankCoordinates) -> tuple[int, int]:
    """Return size and rank of the group that a module's parameters are split over; experts have their own."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if getattr(owner, "is_expert", False) and hasattr(state, "get_expert_tensor_parallel_world_size"):
        return state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()
    return coordinates.tp_size, coordinates.tp_rank


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
    tokens = getattr(config, "sequence_parallel", False) and getattr(parameter, "sequence_parallel", False)
    heads = getattr(config, "qk_layernorm", False) and _NORMS_OF_HEADS.fullmatch(fqn)
    return TENSOR_GROUP if tokens or heads else ""
