"""The compiled kernel gives the numbers of the definition, and where it cannot be had the run says so."""

from __future__ import annotations

import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_precision.backends import digest_kernel as kernels
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.backends.digest_geometry import KINDS, geometry_of, reading_of
from mindspeed_precision.record.elements import to_bits
from mindspeed_precision.record.sketch import unpack
from mindspeed_precision.record.statistics import digest_host

KERNEL, WHY = kernels.digest_kernel()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason=WHY)


def digest(bits, name, *, statistics=True, sketch=False, reading=None, part=None):
    reading = reading or KINDS[name]
    geometry = geometry_of(bits, reading, part)
    return KERNEL.digest(bits.ctypes.data, geometry, statistics=statistics, sketch=sketch)


def assert_same(found, wanted):
    assert (found.fingerprint, found.unordered) == (wanted.fingerprint, wanted.unordered)
    ours, theirs = found.statistics, wanted.statistics
    for field in ("minimum", "maximum", "zeros", "nans", "infs", "exponents"):
        np.testing.assert_equal(getattr(ours, field), getattr(theirs, field), err_msg=field)
    largest = max(abs(theirs.minimum), abs(theirs.maximum))
    if largest < 1e150:  # beyond, the order of a sum decides whether it overflows
        np.testing.assert_allclose(ours.mean, theirs.mean, rtol=0, atol=1e-12 * largest)
    if 1e-150 < largest < 1e150:  # where squares are normal numbers
        np.testing.assert_allclose(ours.l2_norm, theirs.l2_norm, rtol=1e-12)


def views(bits):
    """Ways to store and to look at one tensor of three dimensions."""
    yield bits
    yield bits.transpose(2, 0, 1)
    yield bits.transpose(2, 1, 0)
    yield bits[1:, ::-1, ::3]
    yield np.broadcast_to(bits[:1], (5, *bits.shape[1:]))
    yield bits[:, :, 0].T
    yield bits[0, 0, :1].reshape(())
    yield bits[:0]


@needs_kernel
@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_bits_in_any_storage(name, data):
    """Every NaN payload, subnormals, infinities; blocks that are whole, in part, and split over rows."""
    width = KINDS[name].width
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40)))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = generator.integers(0, 2 ** (8 * width), shape, dtype=f"u{width}", endpoint=False)
    if data.draw(st.booleans()):  # no infinities, and zeros
        bits >>= np.uint8(2)
        bits[generator.random(shape) < 0.1] = 0
    for view in views(bits):
        assert_same(digest(view, name), digest_host(HostTensor(bits=view, dtype=name), statistics=True))


@needs_kernel
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 3, 100), (7, 33, 65), (3, 700, 90)])
def test_sketch_and_sums_are_the_same_bits_in_any_storage(name, shape):
    values = np.sin(np.arange(np.prod(shape), dtype=np.float64)) * 3
    values[:: len(values) // 2 + 1] = np.nan
    bits = to_bits(values, name).reshape(shape)
    wanted = digest_host(HostTensor(bits=bits, dtype=name), statistics=True, sketch=True)
    found = digest(bits, name, sketch=True)
    assert_same(found, wanted)
    scale = np.abs(unpack(wanted.sketch)).max()
    np.testing.assert_allclose(unpack(found.sketch), unpack(wanted.sketch), rtol=0, atol=1e-8 * scale)
    stored = [np.asfortranarray(bits), np.ascontiguousarray(bits.transpose(1, 0, 2)).transpose(1, 0, 2)]
    assert repr([digest(other, name, sketch=True) for other in stored]) == repr([found, found])


@needs_kernel
@pytest.mark.parametrize("change", ["bit", "rows", "shift"])
def test_a_change_is_seen(change):
    bits = np.random.default_rng(0).integers(0, 2**32, (40, 70), dtype=np.uint32)
    before, other = digest(bits, "float32"), bits.copy()
    if change == "bit":
        other[17, 3] ^= 1
    else:
        other = (
            other[[1, 0, *range(2, 40)]] if change == "rows" else np.roll(other.ravel(), 1).reshape(40, 70)
        )
    assert digest(other, "float32").fingerprint != before.fingerprint
    assert (digest(other, "float32").unordered == before.unordered) == (change != "bit")


@needs_kernel
def test_types_of_one_byte_and_types_without_numbers():
    codes = np.arange(256, dtype=np.uint8).repeat(5)
    host = HostTensor(bits=codes, dtype="float8_e5m2")
    from mindspeed_precision.record.elements import to_numbers

    table = to_numbers(HostTensor(bits=np.arange(256, dtype=np.uint8), dtype="float8_e5m2"))
    reading = reading_of("float8_e5m2", width=1, numbers=table, floating=True)
    assert_same(digest(codes, "", reading=reading), digest_host(host, statistics=True))
    bits = reading_of("unheard-of", width=2, numbers=None, floating=False)
    words = codes.astype(np.uint16)
    found = digest(words, "", reading=bits, statistics=False)
    assert found == digest_host(HostTensor(bits=words, dtype="uint16"), statistics=False)


@needs_kernel
@pytest.mark.parametrize("name", ["bfloat16", "float32", "float64", "int32"])
def test_blocks_of_zeros(name):
    """They are told apart from blocks with one bit, or one negative zero, in them."""
    width = KINDS[name].width
    for count in (1, 3, 1024, 5000):
        for place in (None, 0, count // 2, count - 1):
            bits = np.zeros(count, f"u{width}")
            if place is not None:
                bits[place] = 1 << (8 * width - 1)
            host = HostTensor(bits=bits, dtype=name)
            found, wanted = digest(bits, name, sketch=name != "int32"), digest_host(host, statistics=True)
            assert_same(found, wanted)


@needs_kernel
@pytest.mark.parametrize("name", ["complex64", "float16", "uint8", "bool"])
@pytest.mark.parametrize("sketch", [False, True])
def test_tensors_on_the_host(name, sketch):
    shape, width = ((30, 50, 2), 4) if name == "complex64" else ((30, 50), 2 if name == "float16" else 1)
    bits = np.arange(np.prod(shape)).reshape(shape).astype(f"u{width}")
    host = HostTensor(bits=bits & 1 if name == "bool" else bits, dtype=name)
    found = kernels.digest_on_host(host, statistics=True, sketch=sketch)
    wanted = digest_host(host, statistics=True, sketch=sketch)
    assert_same(found, wanted)
    assert (found.sketch is None) == (wanted.sketch is None)


@needs_kernel
@pytest.mark.parametrize("width", [1, 8, 9, 64, 65, 200])
@pytest.mark.parametrize("least", [1, 190, 247, 254])
@pytest.mark.parametrize("zeros", [False, True])
def test_exponents_of_any_range(width, least, zeros):
    """Windows of bins that end beyond the last one, and ranges that are counted one by one."""
    rng = np.random.default_rng(width * 1000 + least)
    exponents = np.minimum(least + rng.integers(0, width, 5000), 255).astype(np.uint32)
    exponents[rng.integers(0, 5000, 7)] = 255
    if zeros:
        exponents[rng.integers(0, 5000, 500)] = 0
    bits = exponents << np.uint32(23)
    found = digest(bits, "float32").statistics
    expected = digest_host(HostTensor(bits=bits, dtype="float32"), statistics=True).statistics
    assert found.exponents == expected.exponents
    assert sum(found.exponents.values()) == 5000


@needs_kernel
def test_other_threads_run_meanwhile():
    bits = np.ones(1 << 24, np.uint32)
    seen, ended = [], threading.Event()

    def count():
        while not ended.is_set():
            seen.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    meanwhile = 0
    for _ in range(50):  # on a busy machine the other thread may get no processor for one of them
        start = time.perf_counter()
        digest(bits, "float32")
        stop = time.perf_counter()
        meanwhile += sum(start < moment < stop for moment in seen)
        if meanwhile > 2:
            break
    ended.set()
    thread.join()
    assert meanwhile > 2


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    kernels.digest_kernel.cache_clear()
    yield tmp_path
    kernels.digest_kernel.cache_clear()


def test_without_a_compiler_the_reason_is_told(fresh, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    kernel, why = kernels.digest_kernel()
    assert kernel is None
    assert "no-such-compiler" in why


def test_it_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, "off")
    assert kernels.digest_kernel() == (None, f"framework operations: {kernels.SWITCH} is off")


@needs_kernel
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("TURN_SEED = 0x9E", "TURN_SEED = 0x9F", "other numbers"),
        ("zeros += ", "zeros -= ", "other numbers"),
        ("int turn = ", "int turn = 1 ^ ", "other numbers"),
        ("int msp_digest(", "int other(", "msp_digest"),
        ("int msp_digest(", "int msp_digest((", "error"),
        ("", "", "compiled by"),
    ],
)
def test_a_kernel_that_is_wrong_is_not_used(fresh, monkeypatch, right, wrong, said):
    source = fresh / "kernel.c"
    text = kernels.SOURCE.read_text("utf-8")
    assert right in text
    source.write_text(text.replace(right, wrong), "utf-8")
    monkeypatch.setattr(kernels, "SOURCE", source)
    kernel, why = kernels.digest_kernel()
    assert said in why
    assert (kernel is None) == bool(right)


@needs_kernel
def test_it_is_compiled_once(fresh, monkeypatch):
    kernels.digest_kernel()
    (library,) = (fresh / "cache" / "mindspeed-precision").iterdir()
    made = library.stat().st_mtime_ns
    kernels.digest_kernel.cache_clear()
    monkeypatch.setattr(kernels, "_compile", lambda *_: pytest.fail("compiled again"))
    assert kernels.digest_kernel()[0] is not None
    assert library.stat().st_mtime_ns == made


def test_a_directory_that_others_may_write_is_not_loaded_from(fresh):
    directory = fresh / "cache" / "mindspeed-precision"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    chosen = kernels._cache()
    assert chosen != directory
    shutil.rmtree(chosen)
