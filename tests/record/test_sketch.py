"""The definition of the sketch: spelled out, linear, by position, rounded as it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record import sketch as definition
from mindspeed_precision.record.fingerprint import MASK64, mix64_int
from mindspeed_precision.record.sketch import (
    BUCKETS,
    ROUNDOFF,
    SIGN_SEED,
    TURN_SEED,
    pack,
    sketch_host,
    sketch_values,
    unpack,
)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def close(one, two):
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-13 * np.abs(two).max(initial=1.0))
    return True


def test_definition_spelled_out():
    values, expected = numbers(3, 300), [0.0] * BUCKETS
    for place, value in enumerate(values.ravel()):
        turn = mix64_int((place // 256 + TURN_SEED) & MASK64)
        sign = -1 if mix64_int((place // 64 + SIGN_SEED) & MASK64) >> place % 64 & 1 else 1
        expected[(place + turn) % 256] += sign * value
    assert close(sketch_values(values), np.array(expected))


def test_neighbours_share_no_bucket_and_a_column_spreads():
    block = np.zeros((2, 256))
    block[1] = 1.0
    assert np.count_nonzero(sketch_values(block)) == 256
    column = np.zeros((400, 512))
    column[:, 3] = numbers(400)
    assert np.count_nonzero(sketch_values(column)) > 180  # 400 balls leave a fifth of 256 bins empty


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 700), st.integers(1, 5), st.integers(0, 1000))
def test_shards_add_up_in_any_split_and_order(rows, columns, parts, seed):
    values = numbers(rows, columns, seed=seed)
    places = np.arange(values.size).reshape(values.shape)
    owner = np.random.default_rng(seed).integers(0, parts, (rows, columns))
    order = np.random.default_rng(seed + 1).permutation(values.size)
    total = np.zeros(BUCKETS)
    for part in range(parts):
        mine = order[owner.ravel()[order] == part]
        total += sketch_values(values.ravel()[mine], index=places.ravel()[mine])
    assert close(total, sketch_values(values))
    half = columns // 2
    cut = [sketch_values(values[:, s], index=places[:, s]) for s in (slice(half), slice(half, None))]
    assert close(cut[0] + cut[1], sketch_values(values))


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 900), st.floats(-4, 4), st.floats(-4, 4))
def test_linear(size, alpha, beta):
    a, b = numbers(size), numbers(size, seed=1)
    combined = sketch_values(alpha * a + beta * b)
    assert close(combined, alpha * sketch_values(a) + beta * sketch_values(b))


def test_chunks_and_strides_do_not_matter(monkeypatch):
    values = numbers(50, 40)
    whole = sketch_values(values)
    assert close(sketch_values(np.asfortranarray(values)), whole)
    assert close(sketch_values(values.reshape(-1, 8)), whole)
    assert not np.allclose(sketch_values(values.T), whole)
    monkeypatch.setattr(definition, "CHUNK", 300)
    definition._whole.cache_clear()
    try:
        assert close(sketch_values(values), whole)
    finally:
        definition._whole.cache_clear()


def test_what_is_not_finite_counts_as_zero():
    values = numbers(600)
    holes = values.copy()
    holes[[3, 500, 511]] = np.nan, np.inf, -np.inf
    values[[3, 500, 511]] = 0
    assert close(sketch_values(holes), sketch_values(values))


def test_five_bytes_round_to_nearest():
    values = np.concatenate([10.0 ** np.random.default_rng(0).uniform(-300, 300, 255), [0.0]])
    values[::2] *= -1
    packed = pack(values, roundoff=ROUNDOFF)
    assert len(packed.data) == 5 * 256
    error = np.abs(unpack(packed) - values)
    assert (error <= 2.0**-29 * np.abs(values)).all()
    assert (error > 2.0**-31 * np.abs(values)).any()
    assert pack(unpack(packed), roundoff=ROUNDOFF) == packed


@pytest.mark.parametrize("large", [np.inf, np.nan, np.finfo(np.float64).max])
def test_sums_beyond_the_format_give_no_sketch(large):
    values = np.zeros(256)
    values[7] = large
    assert pack(values, roundoff=ROUNDOFF) is None
    values[7] = 1e308
    assert pack(values, roundoff=ROUNDOFF) is not None


@pytest.mark.parametrize(
    ("dtype", "bits", "wanted"),
    [
        ("float32", np.zeros(2, np.uint32), True),
        ("bfloat16", np.zeros(2, np.uint16), True),
        ("float8_e4m3fn", np.zeros(3, np.uint8), True),
        ("complex64", np.zeros((1, 2), np.uint32), True),
        ("float32", np.zeros((), np.uint32), False),
        ("float32", np.zeros(0, np.uint32), False),
        ("int64", np.zeros(5, np.uint64), False),
        ("bool", np.zeros(5, np.uint8), False),
    ],
)
def test_who_gets_a_sketch(dtype, bits, wanted):
    assert (sketch_host(HostTensor(bits=bits, dtype=dtype)) is not None) == wanted
