"""Rounding to an element type: the inverse of reading it, and what torch does."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import to_bits, to_numbers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_was_read_is_given_back(dtype):
    width = np.uint32 if dtype == "float32" else np.uint16
    bits = np.random.default_rng(0).integers(0, np.iinfo(width).max, (64, 65), dtype=width, endpoint=True)
    numbers = to_numbers(HostTensor(bits=bits, dtype=dtype))
    known = ~np.isnan(numbers)  # a NaN stays one, whatever its payload
    assert np.array_equal(to_bits(numbers, dtype)[known], bits[known])
    assert np.isnan(to_numbers(HostTensor(bits=to_bits(numbers, dtype), dtype=dtype)))[~known].all()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_rounded_as_torch_rounds_them(dtype):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(100, 100, generator=generator).to(kind) for _ in range(2))
    total = to_bits((one.float() + two.float()).numpy(), dtype)
    assert np.array_equal(total, (one + two).view(torch.int16).numpy().view(np.uint16))
