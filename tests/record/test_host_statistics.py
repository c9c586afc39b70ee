"""Statistics on the host: the definition, and its scalar short cut."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.record.statistics import digest_host, digest_number, statistics_of


def test_moments_are_over_finite_elements():
    numbers = np.array([3.0, -4.0, 0.0, -0.0, np.nan, np.inf, -np.inf], np.float32)
    found = statistics_of(numbers)
    assert (found.minimum, found.maximum, found.mean, found.l2_norm) == (-4.0, 3.0, -0.25, 5.0)
    assert (found.zeros, found.nans, found.infs) == (2, 1, 2)
    assert found.exponents == {0: 2, 128: 1, 129: 1, 255: 3}


def test_nothing_finite_and_nothing_at_all():
    found = statistics_of(np.array([np.nan, np.inf]))
    assert math.isnan(found.minimum)
    assert math.isnan(found.mean)
    assert found.l2_norm == 0
    assert statistics_of(np.empty(0)).exponents == {}


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.5, -2e-320, 1e300, -3e38, 2**-149, math.inf, -math.inf, math.nan]
)
def test_scalar_short_cut_is_the_array_definition(value):
    array = np.array(value, np.float64)
    expected = digest_host(HostTensor(bits=array.view(np.uint64), dtype="float64"), statistics=True)
    found = digest_number(value)
    assert (found.fingerprint, found.unordered) == (expected.fingerprint, expected.unordered)
    ours, theirs = found.statistics, expected.statistics
    assert (ours.zeros, ours.nans, ours.infs, ours.exponents) == (
        theirs.zeros,
        theirs.nans,
        theirs.infs,
        theirs.exponents,
    )
    if 1e-150 < abs(value) < 1e150:  # elsewhere the square leaves float64, the short cut does not
        assert ours.l2_norm == theirs.l2_norm
    np.testing.assert_equal((ours.minimum, ours.mean), (theirs.minimum, theirs.mean))


def test_unknown_element_type_is_an_error():
    with pytest.raises(IncomparableError, match="float4_e2m1fn_x2"):
        digest_host(HostTensor(bits=np.zeros(2, np.uint8), dtype="float4_e2m1fn_x2"), statistics=True)
