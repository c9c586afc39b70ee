"""The scale signature: a small factor is seen through rounding, and rounding is not taken for a factor."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.compare.metrics import element_metrics, record_metrics
from mindspeed_precision.diagnose.facts import scale_of
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import Comparison, Pair, Phase, RecordKey, Role, TensorRecord, Verdict

KEY = RecordKey(step=0, microbatch=0, phase=Phase.WGRAD, fqn="m", role=Role.WGRAD)
SHAPE = (128, 128)


def rounded(values: np.ndarray, dtype: str) -> HostTensor:
    """Round float64 to nearest even in ``dtype``."""
    single = values.astype(np.float32)
    if dtype == "bfloat16":
        bits = single.view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return HostTensor(bits=bits.astype(np.uint16), dtype=dtype)
    return HostTensor(bits=single.view(np.uint32), dtype=dtype)


def scale(one: HostTensor, two: HostTensor, *, elements: bool = True):
    sides = [
        TensorRecord(
            seq=0,
            key=KEY,
            shape=t.bits.shape,
            dtype=t.dtype,
            layout=None,
            digest=digest_host(t, statistics=True),
        )
        for t in (one, two)
    ]
    metrics = record_metrics(*sides) | (element_metrics(one, two) if elements else {})
    pair = Pair(rank=0, baseline=sides[0], candidate=sides[1])
    return scale_of(Comparison(pair=pair, verdict=Verdict.DIVERGED, metrics=metrics))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.001, 0.5, 2.0, -1.0, 1 / 3])
def test_a_factor_is_measured(dtype, factor):
    values = np.random.default_rng(0).normal(size=SHAPE)
    found = scale(rounded(values, dtype), rounded(values * factor, dtype))
    assert found is not None
    assert found.measured
    assert found.factor == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(5))
def test_another_order_of_summation_is_no_factor(dtype, seed):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=SHAPE)
    noise = 1e-7 * draw.normal(size=SHAPE)
    one, two = rounded(values, dtype), rounded(values + noise, dtype)
    assert (one.bits != two.bits).any()
    assert scale(one, two) is None
    assert scale(one, two, elements=False) is None


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.01])
def test_statistics_alone_show_a_plain_factor(factor):
    values = np.random.default_rng(0).normal(size=SHAPE)
    found = scale(rounded(values, "float32"), rounded(values * factor, "float32"), elements=False)
    assert found is not None
    assert not found.measured


def test_wrong_rows_are_no_factor():
    values = np.random.default_rng(0).normal(size=SHAPE)
    wrong = values.copy()
    wrong[:8] *= 2
    for elements in (True, False):
        assert scale(rounded(values, "float32"), rounded(wrong, "float32"), elements=elements) is None
