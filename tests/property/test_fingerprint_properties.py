"""What must hold of the fingerprint for any tensor, on numpy and on torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.record.fingerprint import fingerprints
from mindspeed_precision.record.statistics import statistics_of

torch = pytest.importorskip("torch")

from mindspeed_precision.backends import load_backend  # noqa: E402

pytestmark = pytest.mark.torch

BACKEND = load_backend("torch")
TYPES = {
    "bfloat16": (np.uint16, torch.int16),
    "float16": (np.uint16, torch.int16),
    "float32": (np.uint32, torch.int32),
    "float64": (np.uint64, torch.int64),
    "float8_e4m3fn": (np.uint8, torch.uint8),
    "float8_e5m2": (np.uint8, torch.uint8),
    "int8": (np.uint8, torch.uint8),
    "int32": (np.uint32, torch.int32),
    "int64": (np.uint64, torch.int64),
    "uint16": (np.uint16, torch.int16),
}


def tensors(min_size=1):
    """Random bit patterns of a random type: NaN payloads, subnormals and infinities included."""
    shapes = arrays.array_shapes(min_dims=1, max_dims=3, max_side=7).filter(lambda s: np.prod(s) >= min_size)
    return st.sampled_from(sorted(TYPES)).flatmap(
        lambda name: st.tuples(st.just(name), arrays.arrays(TYPES[name][0], shapes))
    )


def as_torch(name, bits):
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}").copy())
    return signed.view(TYPES[name][1]).view(getattr(torch, name))


def digest(tensor):
    (found,) = BACKEND.finish_digests([BACKEND.begin_digest(tensor, statistics=True)])
    return found


@settings(deadline=None, max_examples=60)
@given(tensors(), st.data())
def test_storage_does_not_matter_and_both_implementations_agree(sample, data):
    name, bits = sample
    order = data.draw(st.permutations(range(bits.ndim)))
    tensor = as_torch(name, bits).permute(*order)
    logical = bits.transpose(order)
    roomy = torch.zeros([2 * n + 1 for n in tensor.shape], dtype=TYPES[name][1]).view(tensor.dtype)
    window = roomy[tuple(slice(1, None, 2) for _ in tensor.shape)]
    window.copy_(tensor)
    expected = fingerprints(logical)
    for stored in (tensor, tensor.contiguous(), window):
        found = digest(stored)
        assert (found.fingerprint, found.unordered) == expected


@settings(deadline=None, max_examples=40)
@given(tensors(), st.integers(1, 4))
def test_an_expanded_tensor_is_its_logical_self(sample, repeats):
    name, bits = sample
    expanded = as_torch(name, bits)[None].expand(repeats, *bits.shape)
    assert digest(expanded).fingerprint == fingerprints(np.broadcast_to(bits, expanded.shape))[0]


@settings(deadline=None, max_examples=60)
@given(tensors())
def test_statistics_agree(sample):
    name, bits = sample
    found, wanted = (
        digest(as_torch(name, bits)).statistics,
        statistics_of(to_numbers(HostTensor(bits=bits, dtype=name))),
    )
    for entry in ("minimum", "maximum", "zeros", "nans", "infs", "exponents"):
        np.testing.assert_equal(getattr(found, entry), getattr(wanted, entry))
    largest = max(abs(wanted.minimum), abs(wanted.maximum))
    if np.isfinite(wanted.l2_norm) and largest < 1e300:
        np.testing.assert_allclose(found.mean, wanted.mean, rtol=1e-9, atol=1e-12 * largest)
        np.testing.assert_allclose(found.l2_norm, wanted.l2_norm, rtol=1e-9)


@settings(deadline=None, max_examples=150)
@given(tensors(), st.data())
def test_any_single_bit_flip_is_seen(sample, data):
    _, bits = sample
    changed = bits.copy()
    at = data.draw(st.integers(0, bits.size - 1))
    changed.flat[at] ^= bits.dtype.type(1 << data.draw(st.integers(0, 8 * bits.itemsize - 1)))
    before, after = fingerprints(bits), fingerprints(changed)
    assert before[0] != after[0]
    assert before[1] != after[1]


@settings(deadline=None, max_examples=150)
@given(tensors(min_size=2), st.data())
def test_permutations_change_the_ordered_fingerprint_alone(sample, data):
    _, bits = sample
    flat = bits.reshape(-1)
    permuted = flat[np.array(data.draw(st.permutations(range(flat.size))))]
    before, after = fingerprints(flat), fingerprints(permuted)
    assert before[1] == after[1]
    assert (before[0] == after[0]) == np.array_equal(flat, permuted)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 9), st.integers(1, 9), st.data())
def test_swapped_duplicated_and_shifted_rows_are_seen(rows, columns, data):
    bits = np.random.default_rng(rows * 16 + columns).integers(0, 2**16, (rows, columns)).astype(np.uint16)
    one = data.draw(st.integers(0, rows - 1))
    other = data.draw(st.integers(0, rows - 1).filter(lambda row: row != one))
    swapped, duplicated = bits.copy(), bits.copy()
    swapped[[one, other]] = bits[[other, one]]
    duplicated[other] = bits[one]
    for changed in (swapped, duplicated, np.roll(bits, 1, 0), np.roll(bits.ravel(), 1).reshape(bits.shape)):
        assert (fingerprints(changed)[0] == fingerprints(bits)[0]) == np.array_equal(changed, bits)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 50), st.integers(2, 400), st.sampled_from(["u1", "u2", "u4", "u8"]), st.data())
def test_rectangles_that_are_swapped_duplicated_or_shifted_are_seen(rows, columns, width, data):
    """In tensors of many blocks of the fingerprint: keys repeat from one to the next, but for a factor."""
    generator = np.random.default_rng(rows * 1000 + columns)
    bits = generator.integers(0, 2**64, (rows, columns), dtype=np.uint64).astype(width)
    high, wide = data.draw(st.integers(1, rows // 2)), data.draw(st.integers(1, columns // 2))
    corners = st.tuples(st.integers(0, rows - high), st.integers(0, columns - wide))
    (top, left), (low, right) = data.draw(corners), data.draw(corners)
    one = (slice(top, top + high), slice(left, left + wide))
    other = (slice(low, low + high), slice(right, right + wide))
    duplicated, exchanged, shifted = bits.copy(), bits.copy(), bits.copy()
    duplicated[other] = bits[one]
    shifted[one] = np.roll(bits[one], 1, data.draw(st.integers(0, 1)))
    if abs(top - low) >= high or abs(left - right) >= wide:
        exchanged[one], exchanged[other] = bits[other], bits[one]
    for changed in (duplicated, exchanged, shifted):
        assert (fingerprints(changed)[0] == fingerprints(bits)[0]) == np.array_equal(changed, bits)
