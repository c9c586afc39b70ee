"""The definition of the fingerprint: known values, positions, shards, chunks."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump import format as dump_format
from mindspeed_precision.record import fingerprint
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.record.fingerprint import fingerprints, fingerprints_of_one, mix64, mix64_int


def test_mix64_is_splitmix64():
    """The reference generator with seed 1234567 gives these numbers (Vigna's splitmix64.c)."""
    gamma, state, outputs = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + gamma) & fingerprint.MASK64
        outputs.append(mix64_int(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_array_and_integer_forms_agree():
    values = [0, 1, 2**63, fingerprint.MASK64, 0x0123456789ABCDEF]
    assert mix64(np.array(values, np.uint64)).tolist() == [mix64_int(v) for v in values]
    for value in values:
        assert fingerprints(np.array([value], np.uint64)) == fingerprints_of_one(value)


def test_definition_spelled_out():
    bits = np.array([[3, 1], [4, 1]], np.uint16)
    ordered = unordered = 0
    for position, element in enumerate([3, 1, 4, 1]):
        ordered += mix64_int(mix64_int((position + fingerprint.SEED) & fingerprint.MASK64) ^ element)
        unordered += mix64_int(element ^ fingerprint.UNORDERED_KEY)
    assert fingerprints(bits) == (ordered & fingerprint.MASK64, unordered & fingerprint.MASK64)


def test_empty_is_zero_and_bool_is_zero_and_one():
    assert fingerprints(np.empty((0, 3), np.uint8)) == (0, 0)
    assert fingerprints(np.array([True, False])) == fingerprints(np.array([1, 0], np.uint8))


def test_width_is_zero_extended():
    assert fingerprints(np.array([0xFFFF], np.uint16)) == fingerprints(np.array([0xFFFF], np.uint64))


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1.0, np.nextafter(np.float32(1), np.float32(2)))])
def test_bits_not_values_decide(one, other):
    pair = [np.array([value], np.float32).view(np.uint32) for value in (one, other)]
    assert fingerprints(pair[0])[0] != fingerprints(pair[1])[0]


def test_nan_payloads_differ():
    assert fingerprints(np.array([0x7FC0], np.uint16)) != fingerprints(np.array([0x7FC1], np.uint16))


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_add_up_with_canonical_indices(axis):
    whole = np.random.default_rng(0).integers(0, 2**16, (8, 12)).astype(np.uint16)
    index = np.arange(whole.size).reshape(whole.shape)
    shards = [
        fingerprints(part, index=place)
        for part, place in zip(np.split(whole, 4, axis), np.split(index, 4, axis), strict=True)
    ]
    total = tuple(sum(values) & fingerprint.MASK64 for values in zip(*shards, strict=True))
    assert total == fingerprints(whole)
    # without their places the shards add up to something else, so the test can fail
    blind = sum(fingerprints(part)[0] for part in np.split(whole, 4, axis)) & fingerprint.MASK64
    assert blind != fingerprints(whole)[0]


def test_chunks_and_strides_do_not_matter(monkeypatch):
    bits = np.random.default_rng(1).integers(0, 2**32, (37, 11)).astype(np.uint32)
    expected = fingerprints(bits)
    monkeypatch.setattr(fingerprint, "CHUNK", 7)
    assert fingerprints(bits) == expected
    assert fingerprints(np.asfortranarray(bits)) == expected
    assert fingerprints(bits.T) == fingerprints(np.ascontiguousarray(bits.T))


def test_dump_names_this_definition():
    assert dump_format.FINGERPRINT == fingerprint.ALGORITHM


def test_float8_tables_match_their_definition():
    e4m3 = to_numbers(HostTensor(bits=np.arange(256, dtype=np.uint8), dtype="float8_e4m3fn"))
    assert e4m3[0x7E] == 448
    assert e4m3[0x01] == 2**-9
    assert np.isnan(e4m3[[0x7F, 0xFF]]).all()
    assert np.isnan(e4m3).sum() == 2
    e5m2 = to_numbers(HostTensor(bits=np.arange(256, dtype=np.uint8), dtype="float8_e5m2"))
    assert e5m2[0x7B] == 57344
    assert e5m2[0xFC] == -np.inf
    assert np.isnan(e5m2).sum() == 6
