"""Noise of one rounding: of the size that it says, on every element, and the same in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.compare.ulp import ulp_distance
from mindspeed_precision.record.elements import UNIT_ROUNDOFF, to_bits, to_numbers
from mindspeed_precision.record.noise import perturbed, signs
from mindspeed_precision.record.placement import canonical_index, cut
from mindspeed_precision.records import Part, Placement, Split

FLOATS = ("float32", "bfloat16", "float16")


def host(dtype, shape=(32, 6), seed=0):
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return HostTensor(bits=to_bits(numbers, dtype), dtype=dtype)


def noisy(tensor, **settings):
    index = np.arange(tensor.bits.size)
    return perturbed(tensor, index, **{"name": "w", "seed": 0, "epsilon": None, **settings})


@pytest.mark.parametrize("dtype", FLOATS)
@given(seed=st.integers(0, 2**31))
def test_one_rounding_moves_an_element_by_one_unit_in_the_last_place(dtype, seed):
    tensor = host(dtype, seed=seed)
    moved = noisy(tensor, seed=seed)
    distance = ulp_distance(tensor, moved)
    assert distance.max() == 1
    assert (distance == 1).mean() > 0.9  # some ties round back


@given(epsilon=st.floats(1e-5, 0.1))
def test_another_size_is_relative_too(epsilon):
    tensor = host("float32")
    one, two = (to_numbers(side).astype(np.float64) for side in (tensor, noisy(tensor, epsilon=epsilon)))
    assert np.abs(two / one - 1) == pytest.approx(epsilon, abs=2 * UNIT_ROUNDOFF["float32"])


def test_zeros_and_what_is_not_finite_stay():
    numbers = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5], np.float32)
    tensor = HostTensor(bits=numbers.view(np.uint32), dtype="float32")
    moved = noisy(tensor)
    assert (moved.bits[:5] == tensor.bits[:5]).all()
    assert moved.bits[5] != tensor.bits[5]


@given(dim=st.sampled_from([0, 1]), size=st.sampled_from([2, 3]), seed=st.integers(0, 99))
def test_shards_get_the_noise_of_the_whole(dim, size, seed):
    whole = host("float32", shape=(12, 6))
    expected = noisy(whole, seed=seed)
    held = whole.bits.shape[dim] // size
    for rank in range(size):
        blocks = ((rank * held, held),)
        placement = Placement(shape=(12, 6), splits=(Split(dim=dim, blocks=blocks),))
        index = canonical_index(Part(placement=placement, start=0, stop=placement.local_numel))
        shard = HostTensor(bits=cut(whole.bits, placement), dtype="float32")
        moved = perturbed(shard, index, name="w", seed=seed, epsilon=None)
        assert (moved.bits == cut(expected.bits, placement)).all()


def test_signs_are_even_and_depend_on_name_and_seed():
    index = np.arange(1 << 16)
    drawn = {(name, seed): signs(name, seed, index) for name in ("a", "b") for seed in (0, 1)}
    for one in drawn.values():
        assert set(np.unique(one)) == {-1, 1}
        assert abs(one.mean()) < 0.02  # five standard deviations
    for one, two in ((("a", 0), ("b", 0)), (("a", 0), ("a", 1)), (("a", 1), ("b", 0))):
        assert abs(np.mean(drawn[one] * drawn[two].astype(float))) < 0.02
