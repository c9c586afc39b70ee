"""What Megatron's distributed optimizer keeps, in the format ``torch``: flat buffers, divided by parameters.

``distrib_optim.pt`` has a flat tensor of each buffer's master parameters and moments, and does not say which
elements are which parameter's. The order is that of ``megatron.core.distributed`` ``_ParamAndGradBuffer``:
parameters of one dtype, the model's last one first, each beginning at a multiple of 64 elements of its
bucket; of a bucket the padding behind its last parameter is left out. What is so divided is believed only if
the lengths add up and the beginning of every master parameter, rounded, is the beginning of the model's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_precision.ckpt.stored import Stored
from mindspeed_precision.ckpt.sums import numbers, rounded
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.torch_archive.archive import TorchArchive
from mindspeed_precision.torch_archive.names import TYPES
from mindspeed_precision.torch_archive.opcodes import Global, TensorReference

_ALIGNED = 64
_COMPARED = 256
_LEAST_BUCKET, _BUCKET_BY_RANK = 40_000_000, 1_000_000
_MASTER = "param"
_ROLES = {"param": "master_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True, kw_only=True)
class ModelParameter:
    """A parameter of a rank's file.

    Attributes:
        chunk: its model chunk.
        name: its own name there.
        reference: where its elements are.
        dtype: their type.
    """

    chunk: int
    name: str
    reference: TensorReference
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.reference.shape:
            count *= size
        return count


Divided = Iterator[tuple[str, int, str, Stored]]


def divided(
    buffers: TorchArchive,
    model: TorchArchive,
    parameters: Sequence[ModelParameter],
    args: Mapping[str, Any],
    label: str,
) -> tuple[list[tuple[str, int, str, Stored]], list[str]]:
    """Divide the buffers of a rank by its parameters.

    Args:
        buffers: ``distrib_optim.pt``.
        model: the rank's file.
        parameters: of the rank, in the model's order.
        args: Megatron's arguments: they say how large buckets are.
        label: the rank, for messages.

    Returns:
        ``(role, chunk, the parameter's own name, tensor)``, and what could not be divided, and why.
    """
    root = buffers.root
    found: list[tuple[str, int, str, Stored]] = []
    unread: list[str] = []
    several = list(root) if isinstance(root, (list, tuple)) else [root]
    for optimizer in several:
        for chunk, dtype, state in _buffers(optimizer):
            mine = [one for one in parameters if one.chunk == chunk and one.dtype == dtype]
            starts = _starts(buffers, model, state, mine, args, experts=len(several) > 1)
            if starts is None:
                unread.append(
                    f"{label}/distrib_optim.pt: the buffer of {dtype} parameters is in no order that is known"
                )
                continue
            found += _cut(buffers, state, starts, label)
    return found, unread


def _buffers(optimizer: Any) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield model chunk, element type and tensors of each buffer."""
    seen: Counter[str] = Counter()
    for number, by_type in optimizer.items() if isinstance(optimizer, Mapping) else ():
        if not isinstance(number, int) or not isinstance(by_type, Mapping):
            continue
        for key, state in by_type.items():
            first = key[0] if isinstance(key, tuple) and key else key
            dtype = TYPES.get(first.name, "") if isinstance(first, Global) else ""
            if isinstance(state, Mapping) and isinstance(state.get(_MASTER), TensorReference):
                yield seen[dtype], dtype, state
                seen[dtype] += 1


Starts = list[tuple[ModelParameter, int]]


def _starts(
    buffers: TorchArchive,
    model: TorchArchive,
    state: Mapping[str, Any],
    parameters: Sequence[ModelParameter],
    args: Mapping[str, Any],
    *,
    experts: bool,
) -> Starts | None:
    """Return where each parameter begins in a buffer; None: in no way that is known."""
    (length,) = state[_MASTER].shape if len(state[_MASTER].shape) == 1 else (-1,)
    of_experts = [one for one in parameters if ".experts." in one.name]
    others = [one for one in parameters if ".experts." not in one.name]
    for members in (others, of_experts) if experts else (parameters,):
        for bucket in (0, _bucket_size(args)):
            starts, end = _laid_out(members, bucket, args)
            if end == length and starts and _believed(buffers, model, state[_MASTER], starts):
                return starts
    return None


def _bucket_size(args: Mapping[str, Any]) -> int:
    asked, ranks = args.get("ddp_bucket_size"), args.get("data_parallel_size")
    if isinstance(asked, int) and asked > 0:
        return asked
    return max(_LEAST_BUCKET, _BUCKET_BY_RANK * (ranks if isinstance(ranks, int) else 1))


def _laid_out(
    parameters: Sequence[ModelParameter], bucket: int, args: Mapping[str, Any]
) -> tuple[Starts, int]:
    """Lay parameters out, in buckets of at least ``bucket`` elements; 0: in one."""
    starts: Starts = []
    begin = at = 0
    stages = args.get("pipeline_model_parallel_size", 1)
    tied = not args.get("untie_embeddings_and_output_weights") and isinstance(stages, int) and stages > 1
    for one in reversed(parameters):
        at = begin + -(-(at - begin) // _ALIGNED) * _ALIGNED
        alone = tied and re.search(r"word_embeddings\.weight|output_layer\.weight", one.name) is not None
        if alone and at > begin:
            at = begin = starts[-1][1] + starts[-1][0].numel
        starts.append((one, at))
        at += one.numel
        if alone or (bucket and at - begin >= bucket):
            begin = at
    return starts, at


def _believed(buffers: TorchArchive, model: TorchArchive, master: TensorReference, starts: Starts) -> bool:
    flat, kind = buffers.elements(master), buffers.dtype(master)
    for one, start in starts:
        count = min(_COMPARED, one.numel)
        mine = model.elements(one.reference).reshape(-1)[:count]
        values = numbers(flat[start : start + count], kind)
        if one.dtype not in UNIT_ROUNDOFF or not np.array_equal(rounded(values, one.dtype), mine):
            return False
    return True


def _cut(buffers: TorchArchive, state: Mapping[str, Any], starts: Starts, label: str) -> Divided:
    for key, role in _ROLES.items():
        flat = state.get(key)
        if not isinstance(flat, TensorReference) or not buffers.dtype(flat):
            continue
        for one, start in starts:
            shape, stop = one.reference.shape, start + one.numel
            tensor = Stored(
                name=one.name,
                shape=shape,
                dtype=buffers.dtype(flat),
                source=label,
                load=lambda flat=flat, start=start, stop=stop, shape=shape: (  # type: ignore[misc]
                    buffers.elements(flat)[start:stop].reshape(shape)
                ),
            )
            yield role, one.chunk, one.name, tensor


__all__ = ["ModelParameter", "divided"]
