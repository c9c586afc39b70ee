"""Tensors of an entry of ``dump.json``: shape, type, what is said of the elements, where they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.records import Statistics, Summary

CRC32 = "crc32"
"""Of the bytes of the elements in C order."""

CRC32_WIDENED = "crc32 of float32"
"""The same of bfloat16 that was widened to float32 before: MindSpore's."""

XOR64 = "xor64"
"""msprobe's own, a number of 64 bits."""

DEEPEST = 32
"""Nesting of lists and mappings in one argument that is followed."""

MOST = 1 << 16
"""Tensors of one entry that are read."""

_TENSOR_TYPES = ("torch.Tensor", "mindspore.Tensor", "numpy.ndarray")


@dataclass(frozen=True, kw_only=True)
class DumpedTensor:
    """One tensor, as an entry describes it.

    Attributes:
        slot: where it is in its list of arguments or results: ``0``, ``1.0``, ``attention_mask``.
        shape: logical shape.
        dtype: framework-neutral name of the element type.
        summary: what msprobe says of the elements.
        requires_grad: whether autograd follows it; None where it was not written (MindSpore).
        file: ``data_name`` of its elements; None where they were not kept.
    """

    slot: str
    shape: tuple[int, ...]
    dtype: str
    summary: Summary
    requires_grad: bool | None
    file: str | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def likeness(self) -> tuple[object, ...]:
        """What two entries of one tensor have in common, whatever their slots."""
        found = self.summary
        return (
            self.shape,
            self.dtype,
            *(found.maximum, found.minimum, found.mean, found.l2_norm, found.checksum),
        )


def tensors_of(value: Any, framework: str, slot: str = "", depth: int = 0) -> Iterator[DumpedTensor]:
    """Yield the tensors of a list of arguments or results, in order.

    Args:
        value: of ``input_args``, ``input_kwargs``, ``output``, ``parameters`` …
        framework: of the dump: checksums differ by it.
        slot: of what contains it.
        depth: how deep it lies.

    Raises:
        ValueError: an entry is nested too deeply, or a tensor is not described as msprobe does it.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    if isinstance(value, dict) and isinstance(value.get("type"), str) and "shape" in value:
        if _is_tensor(value["type"]):
            yield _tensor(value, framework, slot)
        return
    inner: Any = ()
    if isinstance(value, dict) and not isinstance(value.get("type"), str):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for name, item in inner:
        yield from tensors_of(item, framework, f"{slot}.{name}" if slot else str(name), depth + 1)


def _is_tensor(kind: str) -> bool:
    return kind in _TENSOR_TYPES or kind.endswith("Tensor")


def _tensor(plain: dict[str, Any], framework: str, slot: str) -> DumpedTensor:
    shape, dtype, file = plain["shape"], plain.get("dtype"), plain.get("data_name")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise ValueError(f"no shape: {str(shape)[:60]}")
    if type(dtype) is not str or not isinstance(file, str | None):
        raise ValueError(f"no dtype, or no data_name: {str(dtype)[:60]}, {str(file)[:60]}")
    gradient = plain.get("requires_grad")
    name = element_type(dtype)
    return DumpedTensor(
        slot=slot,
        shape=tuple(shape),
        dtype=name,
        summary=_summary(plain, name, math.prod(shape), framework),
        requires_grad=gradient if isinstance(gradient, bool) else None,
        file=file,
    )


def element_type(text: str) -> str:
    """Return the framework-neutral name of a type: ``torch.bfloat16`` and ``BFloat16`` are ``bfloat16``."""
    name = text.rpartition(".")[2].lower()
    return {"float": "float32", "half": "float16", "double": "float64", "bool_": "bool"}.get(name, name)


def _summary(plain: dict[str, Any], dtype: str, numel: int, framework: str) -> Summary:
    maximum, minimum, mean, norm = (_number(plain.get(name)) for name in ("Max", "Min", "Mean", "Norm"))
    known = (maximum, minimum)
    if all(value is not None and math.isfinite(value) for value in known):
        # of half precision the norm may be beyond the type though no element is
        mean, norm = (value if value is None or math.isfinite(value) else None for value in (mean, norm))
    if norm is not None:
        norm = abs(norm)  # of a number msprobe writes the number itself
    checksum, algorithm = _checksum(plain.get("md5"), dtype, framework)
    return Summary(
        maximum=maximum,
        minimum=minimum,
        mean=mean,
        l2_norm=norm,
        roundoff=roundoff(dtype, numel),
        checksum=checksum,
        algorithm=algorithm,
    )


def roundoff(dtype: str, numel: int) -> float:
    """Bound the relative error of a norm that was summed in float32 and kept in the tensor's own type.

    One rounding to the type, and the square root of the number of additions times float32's (Higham and Mary,
    SIAM J. Sci. Comput. 41(5), 2019, as in ``compare.depth``).
    """
    return UNIT_ROUNDOFF.get(dtype, 0.0) + UNIT_ROUNDOFF["float32"] * math.sqrt(max(numel, 1))


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return float(value)
    return None


def _checksum(value: Any, dtype: str, framework: str) -> tuple[str, str]:
    if not isinstance(value, str) or not value:
        return "", ""
    if value.startswith("0x"):
        return value.lower(), XOR64
    widened = dtype == "bfloat16" and framework != "pytorch"
    return value.lower(), CRC32_WIDENED if widened else CRC32


def statistics_from(summary: Summary, numel: int) -> Statistics | None:
    """Return the moments that a summary gives, without the counts that msprobe lacks; None: it gives none.

    Max and Min are NaN where an element is, so that with finite ones there is no NaN and no infinity.
    """
    found = (summary.maximum, summary.minimum, summary.mean, summary.l2_norm)
    high, low, mean, norm = found
    if high is None or low is None or mean is None or norm is None or summary.nonfinite:
        return None
    return Statistics(
        minimum=low + 0.0,
        maximum=high + 0.0,
        mean=mean + 0.0,
        l2_norm=norm,
        zeros=numel if high == low == 0 else 0,
        nans=0,
        infs=0,
        counted=False,
    )
