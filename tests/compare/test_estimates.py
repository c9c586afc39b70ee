"""What two sketches tell: within the stated bounds, for every kind of error, and no digit more."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.compare.estimates import DEVIATION, LARGEST, SMALLEST, estimate, sketch_metrics
from mindspeed_precision.record.sketch import SINGLE_ROUNDOFF, sketch_values
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import Phase, RecordKey, Role, TensorRecord

KEY = RecordKey(step=0, phase=Phase.WGRAD, fqn="layer", role=Role.WGRAD)


def record(array, dtype="float64"):
    host = HostTensor(bits=np.ascontiguousarray(array).view(f"u{array.itemsize}"), dtype=dtype)
    digest = digest_host(host, statistics=True, sketch=True)
    return TensorRecord(seq=0, key=KEY, shape=array.shape, dtype=dtype, layout=None, digest=digest)


def dense(a, size, draw):
    return a + size * draw.standard_normal(a.shape)


def row(a, size, draw):
    a[draw.integers(len(a))] *= 1 + size
    return a


def column(a, size, draw):
    a[:, draw.integers(a.shape[1])] *= 1 + size
    return a


def every_head(a, size, draw):
    """The same element of each head: columns as far apart as heads are wide, and rows alike."""
    a[:, draw.integers(16) :: 16] += size
    return a


def block(a, size, draw):
    a[: len(a) // 4, : a.shape[1] // 4] *= 1 + size
    return a


def element(a, size, draw):
    a[draw.integers(len(a)), draw.integers(a.shape[1])] += 50 * size
    return a


def scale(a, size, draw):
    return a * (1 + size)


def rank_one(a, size, draw):
    return a + size * np.outer(draw.standard_normal(len(a)), draw.standard_normal(a.shape[1]))


def rows_swapped(a, size, draw):
    a[[1, 2]] = a[[2, 1]]
    return a


def transposed(a, size, draw):
    return a.T.reshape(a.shape)


def permuted(a, size, draw):
    return draw.permutation(a.ravel()).reshape(a.shape)


BLOCKS = 40
ERRORS = (dense, row, column, every_head, block, element, scale, rank_one, rows_swapped, transposed, permuted)


def pairs(error, count, seed=0):
    draw = np.random.default_rng(seed)
    for _ in range(count):
        a = draw.standard_normal((int(draw.integers(64, 128)), int(draw.choice([64, 128, 200, 256, 512]))))
        yield a, error(a.copy(), 10 ** draw.uniform(-7, 0), draw)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_the_bounds_hold(error):
    """100 pairs each, 1100 in all, distances from 1e-7 to 1 and from whole tensors to single elements."""
    ratios = []
    for a, b in pairs(error, 100):
        found, size = estimate(record(a), record(b)), np.linalg.norm(a)
        true = np.linalg.norm(b - a) / size
        assert found.low <= true <= found.high
        assert found.high < 1.8 * true + 2e-8
        if found.distance:
            assert SMALLEST < found.distance / true < LARGEST
            ratios.append(found.distance / true)
        else:
            assert true < 2e-8
        assert abs(found.scale - (a * b).sum() / size**2) <= found.scale_error
        cosine = (a * b).sum() / size / np.linalg.norm(b)
        assert abs(found.cosine - cosine) <= found.cosine_error
    assert len(ratios) > 60
    assert abs(np.mean(ratios) - 1) < 4 * DEVIATION / math.sqrt(len(ratios)) + 1e-3
    assert np.std(ratios) < DEVIATION * (1 + 4 / math.sqrt(2 * len(ratios)))


def test_the_variance_is_the_derived_one_even_for_a_few_wrong_elements():
    """Mean 1 and variance at most 2 / 256 of the squares; two wrong elements can vanish, as documented."""
    draw = np.random.default_rng(3)
    for wrong in (2, 3, 8, 64):
        squares = []
        for _ in range(4000):
            values = np.zeros(BLOCKS * 256)
            values[draw.choice(BLOCKS * 256, wrong, replace=False)] = draw.choice([-1.0, 1.0], wrong)
            squares.append((sketch_values(values) ** 2).sum() / wrong)
        assert abs(np.mean(squares) - 1) < 5 * math.sqrt(2 / 256 / 4000)
        assert np.var(squares) < 2 / 256 * 1.25
        if wrong == 2:
            assert 0 < squares.count(0.0) < 4000 / 512 * 2.5


def test_up_to_256_elements_nothing_is_estimated():
    draw = np.random.default_rng(0)
    a = draw.standard_normal((16, 16))
    b = a + 1e-3 * draw.standard_normal(a.shape)
    found, true = estimate(record(a), record(b)), np.linalg.norm(b - a) / np.linalg.norm(a)
    assert found.distance == pytest.approx(true, rel=1e-4)
    assert found.high - found.low < 4e-8
    assert found.low <= true <= found.high


def test_a_factor_is_exact_and_a_swap_has_none():
    a = np.random.default_rng(0).standard_normal((96, 128))
    metrics = sketch_metrics(record(a), record(a * 1.0003))
    assert metrics["sketch_scale"] == pytest.approx(1.0003, abs=2e-8)
    assert metrics["sketch_residual"] < 1e-7
    swapped = sketch_metrics(record(a), record(np.ascontiguousarray(a[::-1])))
    assert swapped["sketch_residual"] > 0.5
    assert 1.2 < swapped["sketch_distance"] < 1.6


def test_no_digit_beyond_what_is_known():
    a = np.random.default_rng(0).standard_normal((96, 128))
    b = a + 0.01 * np.random.default_rng(1).standard_normal(a.shape)
    metrics = sketch_metrics(record(a), record(b))
    for name in ("sketch_distance", "sketch_low", "sketch_high", "sketch_residual"):
        assert metrics[name] == float(f"{metrics[name]:.1e}")
    assert metrics["sketch_scale"] == round(metrics["sketch_scale"], 3)
    c = a.copy()
    c[0, 0] += 1e-8
    below = sketch_metrics(record(a), record(c))
    assert "sketch_distance" not in below
    assert below["sketch_low"] == 0
    assert 0 < below["sketch_high"] < 2e-8
    assert below["sketch_scale"] == pytest.approx(1, abs=1e-8)


def test_a_coarser_sketch_resolves_less():
    a = np.random.default_rng(0).standard_normal((96, 128))
    one, two = record(a), record(a * (1 + 1e-7))
    assert "sketch_distance" in sketch_metrics(one, two)
    sketch = replace(two.digest.sketch, roundoff=SINGLE_ROUNDOFF)
    coarse = replace(two, digest=replace(two.digest, sketch=sketch))
    assert "sketch_distance" not in sketch_metrics(one, coarse)


@pytest.mark.parametrize("size", [1e-200, 1e200, 1e300])
def test_sizes_at_the_ends_of_float64(size):
    a = size * np.random.default_rng(0).standard_normal((30, 30))
    found = estimate(record(a), record(a * 1.5))
    assert found is None or found.distance == pytest.approx(0.5, rel=0.2)
    assert (found is None) == (size in (1e200, 1e300, 1e-200))  # squares of the norm leave float64


def test_nothing_is_said_of_zeros_and_of_records_without_sketches():
    zero, one = record(np.zeros(300)), record(np.ones(300))
    assert sketch_metrics(zero, one) == {}
    assert sketch_metrics(one, zero) == {}
    bare = replace(one, digest=replace(one.digest, sketch=None))
    assert sketch_metrics(bare, one) == {}
