"""Metrics against numbers that can be worked out by hand, and against numpy where numpy has the type."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.compare.metrics import element_metrics, kind_mismatch, record_metrics
from mindspeed_precision.compare.ulp import ulp_distance
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.record.statistics import digest_host, digest_number
from mindspeed_precision.records import Layout, Phase, RecordKey, Role, TensorRecord

KEY = RecordKey(step=0, phase=Phase.REDUCE, fqn="w", role=Role.REDUCED_GRAD)


def host(array: np.ndarray, dtype: str | None = None) -> HostTensor:
    return HostTensor(bits=array.view(f"uint{8 * array.itemsize}"), dtype=dtype or str(array.dtype))


def bf16(*numbers: float) -> HostTensor:
    return HostTensor(
        bits=(np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16), dtype="bfloat16"
    )


def record(array: np.ndarray, *, statistics: bool = True) -> TensorRecord:
    digest = digest_host(host(array), statistics=statistics)
    return TensorRecord(
        seq=0, key=KEY, shape=array.shape, dtype=str(array.dtype), layout=Layout(stride=()), digest=digest
    )


floats = hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=4), elements=st.floats(width=32))


@given(floats)
def test_ulp_of_a_tensor_to_itself_is_zero(array):
    assert not ulp_distance(host(array), host(array)).any()


@given(
    st.floats(width=32, allow_nan=False),
    st.floats(width=32, allow_nan=False),
    st.floats(width=32, allow_nan=False),
)
def test_ulp_is_a_distance(x, y, z):
    a, b, c = (host(np.array([n], np.float32)) for n in (x, y, z))
    assert ulp_distance(a, b) == ulp_distance(b, a)
    assert ulp_distance(a, c) <= ulp_distance(a, b) + ulp_distance(b, c)


@given(st.floats(width=16, allow_nan=False, allow_infinity=False))
def test_neighbour_is_one_ulp_away(x):
    one = np.array([x], np.float16)
    assert ulp_distance(host(one), host(np.nextafter(one, np.float16(np.inf)))) == 1


def test_ulp_across_zero_and_nan():
    assert ulp_distance(bf16(0.0), bf16(-0.0)) == 0
    assert ulp_distance(bf16(math.nan), bf16(math.nan)) == 0
    assert ulp_distance(bf16(math.nan), bf16(1.0)) == -1
    assert ulp_distance(bf16(1.0), bf16(1.0078125)) == 1
    smallest = HostTensor(bits=np.array([1], np.uint16), dtype="bfloat16")
    negative = HostTensor(bits=np.array([0x8001], np.uint16), dtype="bfloat16")
    assert ulp_distance(smallest, negative) == 2


def test_ulp_of_a_scalar_keeps_its_shape():
    assert ulp_distance(host(np.array(1, np.float32)), host(np.array(2, np.float32))).shape == ()


@pytest.mark.parametrize(
    "other", [bf16(1.0), host(np.ones(2, np.float16)), host(np.ones((1, 1), np.float16))]
)
def test_ulp_never_casts_or_broadcasts(other):
    with pytest.raises(IncomparableError):
        ulp_distance(host(np.ones(1, np.float16)), other)


def test_element_metrics_of_a_scaled_tensor():
    a = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    metrics = element_metrics(host(a), host(a * 2))
    assert metrics["mismatched"] == metrics["elements"] == 8
    assert metrics["scale"] == pytest.approx(2)
    assert metrics["scale_residual"] == pytest.approx(0, abs=1e-15)
    assert metrics["cosine"] == pytest.approx(1)
    assert metrics["rel_frobenius"] == pytest.approx(1)
    assert metrics["max_rel_err"] == 1
    assert metrics["max_abs_err"] == 8
    assert metrics["mean_abs_err"] == 4.5


def test_a_wrong_row_does_not_drown():
    a = np.ones((1000, 8), np.float32)
    b = a.copy()
    b[500] *= 1.5
    metrics = element_metrics(host(a), host(b))
    assert metrics["rel_frobenius"] < 0.02
    first, count = metrics["worst_rows_first"], metrics["worst_rows_count"]
    assert first <= 500 < first + count
    assert metrics["worst_rows_rel_err"] > 0.1


def test_numbers_that_are_not_finite_stay_out_of_the_errors():
    a = np.array([1, np.nan, np.inf, 2], np.float32)
    b = np.array([1, np.nan, 3, 4], np.float32)
    metrics = element_metrics(host(a), host(b))
    assert metrics["nonfinite"] == 2
    assert metrics["mismatched"] == 2
    assert metrics["max_abs_err"] == 2
    assert math.isfinite(metrics["rel_frobenius"])


def test_empty_and_integer_tensors():
    empty = np.zeros((0, 3), np.float32)
    assert element_metrics(host(empty), host(empty)) == {"mismatched": 0, "elements": 0}
    tokens = np.array([3, 1, 2])
    metrics = element_metrics(host(tokens), host(np.array([3, 1, 4])))
    assert metrics["max_abs_err"] == 2
    assert "max_ulp" not in metrics


def test_a_permutation_is_recognised_and_no_element_count_is_invented():
    a = np.arange(6, dtype=np.float32)
    metrics = record_metrics(record(a), record(a[::-1].copy()))
    assert metrics["permutation"] is True
    assert metrics["norm_change"] == 0
    assert "mismatched" not in metrics


def test_without_statistics_only_bits_are_known():
    a = np.arange(6, dtype=np.float32)
    assert record_metrics(record(a, statistics=False), record(a * 2, statistics=False)) == {"bitwise": False}


def test_a_single_number_has_its_errors_without_elements():
    one, two = (
        TensorRecord(seq=0, key=KEY, shape=(), dtype="float64", layout=None, digest=digest_number(x))
        for x in (2.0, 3.0)
    )
    metrics = record_metrics(one, two)
    assert metrics["max_abs_err"] == 1
    assert metrics["rel_frobenius"] == 0.5


def test_kinds_are_named():
    a = record(np.zeros((2, 3), np.float32))
    assert kind_mismatch(a, a) == ""
    assert "[3, 2]" in kind_mismatch(a, record(np.zeros((3, 2), np.float32)))
    assert "float16" in kind_mismatch(a, record(np.zeros((2, 3), np.float16)))
