"""What must hold of any split of any tensor: digests of its parts add up to its own."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.record.fingerprint import fingerprints
from mindspeed_precision.record.merge import merge_digests
from mindspeed_precision.record.placement import canonical_index, cut
from mindspeed_precision.record.sketch import pack, sketch_values, unpack
from mindspeed_precision.record.statistics import digest_host, statistics_of
from mindspeed_precision.records import Digest, Part, Placement, Split

ROUNDOFF = 2.0**-28


@st.composite
def splits(draw):
    """A canonical tensor, and the parts of it that ranks hold: blocks of some dimensions, ranges of them."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=2)))
    of_dims = []
    for dim in dims:
        ranks, stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        held = draw(st.integers(1, 2))
        shape[dim] = ranks * stride * held
        kinds = [tuple(((n * ranks + rank) * held, held) for n in range(stride)) for rank in range(ranks)]
        of_dims.append([Split(dim=dim, blocks=draw(st.permutations(blocks))) for blocks in kinds])
    seed, special = draw(st.integers(0, 2**32 - 1)), draw(st.booleans())
    tensor = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    if special:
        tensor.flat[0], tensor.flat[-1] = np.nan, np.inf
    parts = []
    for chosen in product(*of_dims):
        blocks = tuple(replace(split, blocks=tuple(split.blocks)) for split in chosen)
        placement = Placement(shape=tuple(shape), splits=blocks)
        middle = draw(st.integers(0, placement.local_numel))  # as a distributed optimizer cuts it
        parts += [
            Part(placement=placement, start=start, stop=stop)
            for start, stop in ((0, middle), (middle, placement.local_numel))
            if start < stop
        ]
    return tensor, draw(st.permutations(parts))


def elements(tensor, part):
    return np.ascontiguousarray(cut(tensor, part.placement)).reshape(-1)[part.start : part.stop]


def numpy_digest(numbers, part):
    index = canonical_index(part)
    ordered, unordered = fingerprints(numbers.view(np.uint32), index=index)
    sketch = pack(sketch_values(numbers, index=index), roundoff=ROUNDOFF)
    return Digest(fingerprint=ordered, unordered=unordered, statistics=statistics_of(numbers), sketch=sketch)


def same_moments(found, expected):
    for name in ("zeros", "nans", "infs", "exponents"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("minimum", "maximum"):
        assert np.array_equal(getattr(found, name), getattr(expected, name), equal_nan=True)
    assert math.isclose(found.l2_norm, expected.l2_norm, rel_tol=1e-12)
    assert found.mean == pytest.approx(expected.mean, rel=1e-9, abs=1e-12, nan_ok=True)


@settings(deadline=None, max_examples=150)
@given(splits())
def test_parts_add_up(split):
    tensor, parts = split
    whole = digest_host(HostTensor(bits=tensor.view(np.uint32), dtype="float32"), statistics=True)
    merged = merge_digests(
        [numpy_digest(elements(tensor, part), part) for part in parts],
        [part.stop - part.start for part in parts],
    )
    assert (merged.fingerprint, merged.unordered) == (whole.fingerprint, whole.unordered)
    same_moments(merged.statistics, whole.statistics)
    sums = sketch_values(tensor)
    error = np.linalg.norm(unpack(merged.sketch) - sums)
    assert error <= merged.sketch.roundoff * np.linalg.norm(sums) + 1e-30


@settings(deadline=None, max_examples=60)
@given(splits())
def test_the_index_is_where_the_elements_are(split):
    tensor, parts = split
    seen = np.concatenate([canonical_index(part) for part in parts])
    assert sorted(seen.tolist()) == list(range(tensor.size))
    for part in parts:
        found = tensor.reshape(-1)[canonical_index(part)]
        assert np.array_equal(found, elements(tensor, part), equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(splits().filter(lambda split: len(split[1]) > 1), st.data())
def test_parts_that_are_swapped_do_not_add_up(split, data):
    """The fingerprint sees which part is where; the unordered one does not."""
    tensor, parts = split
    one, two = parts[0], parts[1]
    numbers = [elements(tensor, part) for part in parts]
    if len(numbers[0]) != len(numbers[1]) or np.array_equal(numbers[0], numbers[1]):
        return
    numbers[0], numbers[1] = numbers[1], numbers[0]
    digests = [numpy_digest(n, part) for n, part in zip(numbers, parts, strict=True)]
    merged = merge_digests(digests, [part.stop - part.start for part in parts])
    whole = digest_host(HostTensor(bits=tensor.view(np.uint32), dtype="float32"), statistics=False)
    assert merged.fingerprint != whole.fingerprint, (one, two)
    assert merged.unordered == whole.unordered


@pytest.mark.torch
@settings(deadline=None, max_examples=80)
@given(splits(), st.sampled_from(["float32", "bfloat16", "int32"]), st.booleans())
def test_torch_numbers_the_elements_as_the_definition_does(split, dtype, strided):
    torch = pytest.importorskip("torch")
    from mindspeed_precision.backends import load_backend

    backend = load_backend("torch")
    tensor, parts = split
    live = torch.nan_to_num(torch.from_numpy(tensor)).mul(100).to(getattr(torch, dtype))
    bits = backend.to_host(live).bits
    for part in parts:
        placed = torch.from_numpy(cut(np.arange(tensor.size).reshape(tensor.shape), part.placement).copy())
        shard = live.reshape(-1)[placed.reshape(-1)][part.start : part.stop]
        if strided:  # the same elements, not dense in memory
            shard = torch.stack([shard, shard], 1)[:, 0]
        handle = backend.begin_placed_digest(shard, part, statistics=True, sketch=True)
        (found,) = backend.finish_digests([handle])
        index = canonical_index(part)
        own = bits.reshape(-1)[index]
        assert (found.fingerprint, found.unordered) == fingerprints(own, index=index)
        numbers = to_numbers(HostTensor(bits=own, dtype=dtype))
        same_moments(found.statistics, statistics_of(numbers))
        if found.sketch is not None:
            sums = sketch_values(numbers, index=index)
            assert np.linalg.norm(unpack(found.sketch) - sums) <= 2 * ROUNDOFF * np.linalg.norm(sums)


@pytest.mark.torch
def test_a_shard_larger_than_a_pass_of_the_kernel():
    """Pieces begin anywhere in a row, on columns of a matrix, in two interleaved blocks."""
    torch = pytest.importorskip("torch")
    from mindspeed_precision.backends import load_backend

    backend = load_backend("torch")
    placement = Placement(shape=(300, 1200), splits=(Split(dim=1, blocks=((300, 300), (900, 300))),))
    whole = torch.randn(300, 1200, generator=torch.Generator().manual_seed(0))
    shard = torch.cat([whole[:, 300:600], whole[:, 900:1200]], 1)
    part = Part(placement=placement, start=0, stop=placement.local_numel)
    (found,) = backend.finish_digests([backend.begin_placed_digest(shard, part, statistics=False)])
    assert shard.numel() > 2 * (1 << 16)
    bits = shard.numpy().view(np.uint32)
    assert (found.fingerprint, found.unordered) == fingerprints(bits, index=canonical_index(part))
