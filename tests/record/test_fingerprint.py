"""The definition of the fingerprint: known values, positions, shards, chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump import format as dump_format
from mindspeed_precision.record import fingerprint
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.record.fingerprint import (
    fingerprints,
    fingerprints_of_one,
    half_keys,
    is_zero,
    mix64,
    mix64_int,
)


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
    """The words of the docstring, one by one, over more than two blocks."""
    halves = np.random.default_rng(0).integers(0, 2**16, (1503, 3)).astype(np.uint16)
    numbers = [*halves.ravel().tolist(), 0]  # the last word is half a word
    ordered = unordered = 0
    for place in range(len(numbers) // 2):
        low, high = numbers[2 * place : 2 * place + 2]
        block, word = divmod(place, 1024)
        drawn = mix64_int(word + 0x9E3779B97F4A7C15)
        first, second = drawn % 2**32 | 1, drawn // 2**32 | 1
        inner = (low + 2**16 * high) * first + 0xD1B54A32D192ED03 * (high + 2**16 * low) * second
        ordered += (mix64_int(block + 0x8CB92BA72F3D8DD7) | 1) * inner
    for number in numbers:
        spread = number * 0x6A4D % 2**16
        signed = [value - 2**16 * (value >= 2**15) for value in (number, spread)]
        short = spread // 32 | 1
        unordered += short * (signed[0] * 0xBF58476D1CE4E5B9 + signed[1] * 0x94D049BB133111EB)
    assert fingerprints(halves) == (ordered % 2**64, unordered % 2**64)


@pytest.mark.parametrize("words", [1, 2])
def test_the_unordered_sum_of_wider_elements_spelled_out(words):
    numbers = np.random.default_rng(words).integers(0, 2**32, (40, words)).astype(np.uint32)
    expected = 0
    for row in numbers.tolist():
        turned = [(word << 16 | word >> 16) % 2**32 * 0x9E3779B1 for word in row]
        if words == 1:
            expected += ((row[0] + 0x8021524B) % 2**32) * (turned[0] % 2**32)
        else:
            factors = row[1] + turned[0] + 0x8021524B, row[0] + turned[1]
            expected += (factors[0] % 2**32) * (factors[1] % 2**32)
    assert fingerprints(numbers.view(f"<u{4 * words}"))[1] == expected % 2**64


def test_empty_is_zero_and_bool_is_zero_and_one():
    assert fingerprints(np.empty((0, 3), np.uint8)) == (0, 0)
    assert fingerprints(np.array([True, False])) == fingerprints(np.array([1, 0], np.uint8))


def test_bytes_decide_not_the_width():
    """The unordered one is of elements, so there the width matters; zeros add nothing to either."""
    words = np.random.default_rng(0).integers(1, 2**64, 700, dtype=np.uint64)
    found = [fingerprints(words.view(f"<u{width}")) for width in (8, 4, 2, 1)]
    assert len({ordered for ordered, _ in found}) == 1
    assert len({unordered for _, unordered in found}) == 4
    assert fingerprints(np.append(words, np.zeros(5000, np.uint64))) == found[0]
    assert fingerprints(np.zeros(5000, np.uint64)) == (0, 0)


def test_zeros_are_known_in_runs_of_both_definitions():
    older = mix64_int(0xD1B54A32D192ED03)
    assert is_zero(0, 0, 7)
    assert is_zero(1234, 7 * older % 2**64, 7)
    assert not is_zero(1234, 7 * older % 2**64, 8)
    assert not is_zero(1, 0, 7)


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
    bits = np.random.default_rng(1).integers(0, 2**32, (370, 110)).astype(np.uint32)
    expected = fingerprints(bits)
    monkeypatch.setattr(fingerprint, "CHUNK", 4096)
    assert fingerprints(bits) == expected
    assert fingerprints(np.asfortranarray(bits)) == expected
    assert fingerprints(bits.T) == fingerprints(np.ascontiguousarray(bits.T))


def _shortest(one, two):
    """Return the largest coordinate of the shortest (x, y) with x * one + y * two = 0 mod 2^64 (Lagrange)."""
    shared = math.gcd(one, two, 2**64)
    one, two, modulus = one // shared, two // shared, 2**64 // shared
    if two % 2:
        pair = [(1, -one * pow(two, -1, modulus) % modulus), (0, modulus)]
    else:
        pair = [(-two * pow(one, -1, modulus) % modulus, 1), (modulus, 0)]
    while True:
        (a, b), (c, d) = pair = sorted(pair, key=lambda v: v[0] ** 2 + v[1] ** 2)
        size = a * a + b * b
        steps = (2 * (a * c + b * d) + size) // (2 * size)
        if not steps:
            return max(abs(a), abs(b))
        pair = [(a, b), (c - steps * a, d - steps * b)]


def test_no_change_of_one_word_vanishes():
    """A changed word changes its halves by less than 2^16; F is odd."""
    low, high = (half_keys()[start::2].tolist() for start in (0, 1))
    assert min(_shortest(a, b) for a, b in zip(low, high, strict=True)) > 2**16
    assert _shortest(2**48, 1) <= 2**16  # the search can find one


@pytest.mark.long
def test_no_swap_of_two_words_of_a_block_vanishes():
    low, high = (half_keys()[start::2].tolist() for start in (0, 1))
    differences = (
        _shortest((low[i] - low[j]) % 2**64, (high[i] - high[j]) % 2**64)
        for i in range(1024)
        for j in range(i)
    )
    assert min(differences) > 2**16


def test_no_swap_of_two_halves_of_a_block_vanishes():
    """They differ by less than 2^16, and no two keys by a multiple of 2^48."""
    keys = half_keys()
    differences = keys[:, None] - keys
    np.fill_diagonal(differences, 1)
    assert (differences % np.uint64(2**24) != 0).all()


@pytest.mark.parametrize("shift", [0, 16])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_unordered_sum_tells_numbers_of_16_bits_apart(width, shift):
    """Alone, and as steps between neighbours: those of two elements do not cancel."""
    numbers = np.arange(0x3F80, 0x3F80 + 2**11, dtype=np.uint64) << np.uint64(shift if width > 2 else 0)
    each = np.array([fingerprints(one)[1] for one in numbers.astype(f"u{width}")[:, None]], np.uint64)
    assert len(np.unique(each)) == len(each)
    assert len(np.unique(np.roll(each, -1) - each)) == len(each)


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
