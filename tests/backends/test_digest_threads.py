"""Several threads give the bits of one, whoever takes what; forks, second callers, signals change nothing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_precision.backends import digest_kernel as kernels
from mindspeed_precision.backends.digest_geometry import KINDS, geometry_of
from mindspeed_precision.backends.digest_words import WORDS
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.record.elements import to_bits
from mindspeed_precision.records import Part, Placement, Split

KERNEL, WHY = kernels.digest_kernel()
pytestmark = pytest.mark.skipif(KERNEL is None, reason=WHY)

SIZES = {"float32": 65536, "bfloat16": 131072, "float64": 32768, "int64": 32768}
"""Elements from which several threads are used."""


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    KERNEL.use_threads(kernels.threads_here())


def words_of(bits, name, threads, part=None):
    geometry, out = geometry_of(bits, KINDS[name], part), np.empty(WORDS, np.uint64)
    assert KERNEL.use_threads(threads) == threads
    KERNEL.into(bits.ctypes.data, geometry, out.ctypes.data, statistics=True, sketch=False)
    return out


def numbers(name, count, seed):
    """Numbers of many sizes, with what a sum, an extreme and a count can trip over."""
    rng = np.random.default_rng(seed)
    if name == "int64":
        return rng.integers(-255, 255, count).view("u8")
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)
    kind = seed % 4
    if kind == 1:
        values = np.abs(values)
        values[rng.integers(0, count, 50)] = 0.0
        values[rng.integers(0, count, 50)] = -0.0  # the first zero is the least number, with its sign
    elif kind == 2:
        values[rng.integers(0, count, 9)] = [np.nan, np.inf, -np.inf] * 3
    elif kind == 3:
        values[count // 5 : count // 2] = 0.0  # whole blocks
    return to_bits(values, name)


@pytest.mark.parametrize("name", SIZES)
@settings(deadline=None, max_examples=12)
@given(more=st.integers(0, 70_000), seed=st.integers(0, 1000), threads=st.integers(2, 5))
def test_any_number_of_threads_gives_the_same_bits(name, more, seed, threads):
    bits = numbers(name, SIZES[name] + more, seed)
    np.testing.assert_array_equal(words_of(bits, name, threads), words_of(bits, name, 1))


@pytest.mark.parametrize("seed", range(4))
def test_shards_whose_elements_are_in_many_runs(seed):
    rows = 700
    placement = Placement(shape=(rows, 260), splits=(Split(dim=1, blocks=((3, 101), (150, 77))),))
    count = rows * 178 - 12
    part = Part(placement=placement, start=5, stop=5 + count)
    bits = numbers("float32", count, seed)
    one = words_of(bits, "float32", 1, part)
    np.testing.assert_array_equal(words_of(bits, "float32", 3, part), one)
    geometry = geometry_of(bits, KINDS["float32"], part)
    assert KERNEL.repeats(bits.ctypes.data, geometry, one.ctypes.data)


@pytest.mark.parametrize("where", [0, 70_000, 130_000, 199_999])
def test_a_bit_that_differs_is_seen_in_any_piece(where):
    bits = numbers("float32", 200_000, 0)
    geometry, words = geometry_of(bits, KINDS["float32"], None), words_of(bits, "float32", 2)
    assert KERNEL.repeats(bits.ctypes.data, geometry, words.ctypes.data)
    bits[where] ^= 1
    assert not KERNEL.repeats(bits.ctypes.data, geometry, words.ctypes.data)


def test_several_callers_at_once():
    """Gradients arrive on threads of their own: who finds the helpers taken works alone."""
    tensors = [numbers("float32", 300_000 + 1000 * i, i) for i in range(6)]
    wanted = [words_of(bits, "float32", 1) for bits in tensors]
    KERNEL.use_threads(3)
    wrong = []

    def work(index):
        geometry, out = geometry_of(tensors[index], KINDS["float32"], None), np.empty(WORDS, np.uint64)
        for _ in range(40):
            KERNEL.into(tensors[index].ctypes.data, geometry, out.ctypes.data, statistics=True, sketch=False)
            if not np.array_equal(out, wanted[index]):
                wrong.append(index)

    callers = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
        assert not caller.is_alive()
    assert not wrong


def test_a_child_that_is_forked_has_helpers_of_its_own():
    bits = numbers("float32", 300_000, 0)
    wanted = words_of(bits, "float32", 2)
    child = os.fork()
    if not child:
        signal.alarm(30)  # a child that waits for helpers that it has not is ended
        os._exit(0 if np.array_equal(words_of(bits, "float32", 2), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(words_of(bits, "float32", 2), wanted)


def test_helpers_take_no_signal():
    """A signal of the program is handled by a thread of the program."""
    bits = numbers("float32", 300_000, 0)
    words_of(bits, "float32", 4)
    own = {thread.native_id for thread in threading.enumerate()}
    masks = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) in own:
            continue
        status = (task / "status").read_text("ascii").splitlines()
        (line,) = [line for line in status if line.startswith("SigBlk")]
        masks.append(int(line.split()[1], 16) >> signal.SIGTERM - 1 & 1)
    assert sum(masks) >= 3


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({"WORLD_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "16", "WORLD_SIZE": "64"}, 1),
        ({kernels.THREADS: "7", "LOCAL_WORLD_SIZE": "16"}, 7),
    ],
)
def test_the_ranks_of_a_machine_share_its_processors(monkeypatch, environment, wanted):
    for name in (*kernels._RANKS_HERE, kernels.THREADS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    assert kernels.threads_here() == wanted


@pytest.mark.parametrize("asked", ["0", "-1", "two", "²"])
def test_what_is_no_number_of_threads_is_told(monkeypatch, asked):
    monkeypatch.setenv(kernels.THREADS, asked)
    with pytest.raises(ConfigError, match="no number of threads"):
        kernels.threads_here()
