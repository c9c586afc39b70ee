"""Elements and moments of records as float64, for checks that compute a law anew."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import UNIT_ROUNDOFF, to_bits, to_numbers
from mindspeed_precision.record.sketch import unpack
from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.run_facts import RunFacts

Vector = NDArray[np.float64]


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype; that of float32 for one that is not known to be narrower."""
    return UNIT_ROUNDOFF.get(dtype, 2.0**-4 if dtype.startswith("float8") else UNIT_ROUNDOFF["float32"])


def rounded(values: Vector, dtype: str) -> Vector:
    """Return float64 numbers as a dtype of 16 bits holds them."""
    bits = to_bits(values.astype(np.float32), dtype)
    return to_numbers(HostTensor(bits=bits, dtype=dtype)).astype(np.float64)


def numbers(facts: RunFacts, rank: int, record: TensorRecord | None) -> Vector | None:
    """Return the elements of a record as float64, ``[...]`` of its shape; None where none were kept.

    Raises:
        DumpError: the file that should hold them does not.
    """
    host = None if record is None else facts.payload(rank, record)
    return None if host is None else to_numbers(host).astype(np.float64)


def sketch_of(record: TensorRecord | None) -> tuple[Vector, float] | None:
    """Return a record's sketch ``[256]`` and the norm of the rounding in it; None where none was taken."""
    sketch = None if record is None else record.digest.sketch
    if sketch is None:
        return None
    values = unpack(sketch)
    return values, sketch.roundoff * float(np.linalg.norm(values))


def norm_of(record: TensorRecord | None) -> float | None:
    """Return the 2-norm of a record's finite elements; None where no statistics were kept."""
    found = None if record is None else record.digest.statistics
    return None if found is None else found.l2_norm


def is_finite(record: TensorRecord) -> bool:
    """Tell whether no element is NaN or infinite, as far as statistics say."""
    return record.digest.finite


def moments_of(record: TensorRecord | None) -> tuple[float, float] | None:
    """Return mean and root mean square of a tensor of finite numbers; None where they are not known."""
    found = None if record is None else record.digest.statistics
    if record is None or found is None or found.nans or found.infs or not record.numel:
        return None
    return found.mean, found.l2_norm / math.sqrt(record.numel)
