"""The digest of host memory in one pass, by ``digest_kernel.c``: compiled once per machine, called by ctypes.

Nothing is installed for it. Where there is no compiler, or the result does not agree with the definition, the
backend's own operations are used, and ``run.json`` says why (``numerics.digest_kernel``). A call releases the
GIL. Setting ``MINDSPEED_PRECISION_KERNEL=off`` goes without it, ``MINDSPEED_PRECISION_KERNEL_THREADS`` says
how many threads take a large tensor.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.backends.digest_geometry import KINDS, MAX_DIMS, Geometry, Reading, geometry_of
from mindspeed_precision.backends.digest_words import WORDS, WORDS_WITH_SKETCH, Contents, digests_of
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.record.elements import to_bits
from mindspeed_precision.record.placement import canonical_index
from mindspeed_precision.record.sketch import has_sketch, unpack
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import Digest, Part, Placement, Split

SWITCH = "MINDSPEED_PRECISION_KERNEL"
THREADS = "MINDSPEED_PRECISION_KERNEL_THREADS"
MOST_THREADS = 4
"""More of them would wait for the memory."""

_RANKS_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "WORLD_SIZE", "RANK_SIZE")
"""Where launchers say how many ranks share a machine, or how many there are in all, which is no less."""

SOURCE = Path(__file__).with_name("digest_kernel.c")
INCLUDED = tuple(map(SOURCE.with_name, ("digest_hash.h", "digest_statistics.h", "digest_threads.h")))
COMPILERS = ("cc", "gcc", "clang")
BASE_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread")
TARGET_FLAGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
"""Tried in turn: not every compiler knows each on every processor."""

SHARED_BYTES = 1 << 18
"""From this size on a tensor is digested by several threads, as ``digest_kernel.c`` has it."""

_STATISTICS, _SKETCH = 1, 2
"""What is wanted beside the fingerprints."""


_COMPONENTS = {"complex64": "float32", "complex128": "float64"}


class DigestKernel:
    """The compiled kernel.

    Args:
        library: the shared object.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it is something else.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))  # releases the GIL while it runs
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._digest = loaded.msp_digest
        self._digest.argtypes = [pointer, pointer, integer, pointer]
        self._digest.restype = integer
        self._repeats = loaded.msp_repeats
        self._repeats.argtypes = [pointer, pointer, pointer]
        self._repeats.restype = integer
        self._threads = loaded.msp_threads
        self._threads.argtypes, self._threads.restype = [integer], integer
        loaded.msp_prepare()

    def use_threads(self, threads: int) -> int:
        """Take so many threads for tensors of 256 KiB and more from now on, the calling one included.

        Which thread takes what changes no bit of a digest. Returns how many it will be.
        """
        return int(self._threads(threads))

    def into(self, address: int, geometry: Geometry, out: int, *, statistics: bool, sketch: bool) -> None:
        """Digest a tensor in host memory.

        Args:
            address: of its first element.
            geometry: of the tensor.
            out: where to write ``struct digest``: ``digest_words.WORDS`` of 64 bits, with a sketch
                ``WORDS_WITH_SKETCH``.
            statistics: also the moments.
            sketch: also the sketch; asked for with statistics only.
        """
        wanted = (_STATISTICS if statistics else 0) | (_SKETCH if sketch else 0)
        failed = self._digest(address, geometry.address, wanted, out)
        assert not failed

    def repeats(self, address: int, geometry: Geometry, prior: int) -> bool:
        """Tell whether memory holds what it did when an earlier digest was taken: all of it is read.

        Args:
            address: of its first element.
            geometry: with the ``identity`` of the earlier one.
            prior: where the earlier digest was written.
        """
        return bool(self._repeats(address, geometry.address, prior))

    def digest(self, address: int, geometry: Geometry, *, statistics: bool, sketch: bool = False) -> Digest:
        """Return the digest of a tensor in host memory; arguments as in ``into``."""
        words = np.empty((1, WORDS_WITH_SKETCH if sketch else WORDS), np.uint64)
        self.into(address, geometry, words.ctypes.data, statistics=statistics, sketch=sketch)
        return digests_of(words, [Contents(geometry.numel, statistics, sketch)])[0]

    def agrees(self) -> bool:
        """Tell whether it gives the numbers of the definition, on a few tensors of every type."""
        return all(self._agrees_on(name, reading) for name, reading in KINDS.items())

    def shares(self) -> bool:
        """Tell whether several threads give the bits of one, on a tensor that is large enough for them."""
        bits = to_bits(np.sin(np.arange(SHARED_BYTES // 4 + 37, dtype=np.float64)), "float32")
        geometry = geometry_of(bits, KINDS["float32"], None)
        one, two = np.empty((2, WORDS), np.uint64)
        for threads, words in ((1, one), (2, two)):
            self.use_threads(threads)
            self.into(bits.ctypes.data, geometry, words.ctypes.data, statistics=True, sketch=False)
        return bool(np.array_equal(one, two)) and self.repeats(bits.ctypes.data, geometry, two.ctypes.data)

    def _agrees_on(self, name: str, reading: Reading) -> bool:
        count, width = 3 * 1024 + 37, reading.width  # whole blocks and a part of one
        words = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        samples = [(words >> np.uint64(64 - 8 * width)).astype(f"u{width}")]
        if reading.floating:  # those were of any size; these have a sketch that says something
            samples.append(to_bits(np.sin(np.arange(count, dtype=np.float64)), name))
        return all(
            self._agrees_with(HostTensor(bits=bits, dtype=name), reading)
            and self._agrees_with(HostTensor(bits=bits[: 48 * 64].reshape(48, 64).T, dtype=name), reading)
            for bits in samples
        )

    def _agrees_with(self, host: HostTensor, reading: Reading) -> bool:
        bits, sketch = host.bits, reading.floating
        placed = Part(placement=_sample_placement(bits.size), start=1, stop=bits.size + 1)
        for part in (None, placed):
            geometry = geometry_of(bits, reading, part)
            if geometry.identity is not None and not self._knows_a_repeat(bits, geometry):
                return False
            found = self.digest(bits.ctypes.data, geometry, statistics=True, sketch=sketch)
            index = None if part is None else canonical_index(part)
            if not _same(found, digest_host(host, statistics=True, sketch=sketch, index=index)):
                return False
        return True

    def _knows_a_repeat(self, bits: NDArray[Any], geometry: Geometry) -> bool:
        """Tell whether what is unchanged is told from what differs in one bit, in the middle of a word."""
        words, changed = np.empty(WORDS, np.uint64), bits.copy()
        self.into(bits.ctypes.data, geometry, words.ctypes.data, statistics=False, sketch=False)
        changed.flat[bits.size // 3] ^= bits.dtype.type(2)  # numpy 1 has no common type of uint64 and int
        same, other = (self.repeats(one.ctypes.data, geometry, words.ctypes.data) for one in (bits, changed))
        return same and not other


def _sample_placement(count: int) -> Placement:
    """Return a placement of more than ``count`` elements that no block, word or vector begins with."""
    rows = count // 35 + 2
    return Placement(shape=(rows, 7, 13), splits=(Split(dim=1, blocks=((1, 2), (5, 1))),))


def _same(found: Digest, wanted: Digest) -> bool:
    ours, theirs = found.statistics, wanted.statistics
    if (found.fingerprint, found.unordered) != (wanted.fingerprint, wanted.unordered):
        return False
    exact = ("minimum", "maximum", "zeros", "nans", "infs", "exponents")
    if any(getattr(ours, name) != getattr(theirs, name) for name in exact):
        return False
    rounded = [(getattr(ours, name), getattr(theirs, name)) for name in ("mean", "l2_norm")]
    if not all(a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in rounded):
        return False
    if found.sketch is None or wanted.sketch is None:
        return found.sketch is wanted.sketch
    numbers, expected = unpack(found.sketch), unpack(wanted.sketch)
    return bool(np.abs(numbers - expected).max() <= 1e-7 * np.abs(expected).max())


@lru_cache(maxsize=1)
def digest_kernel() -> tuple[DigestKernel | None, str]:
    """Return the kernel of this machine, or None, and which it is, or why there is none, in one phrase.

    Raises:
        ConfigError: the number of threads that was asked for is none.
    """
    threads = threads_here()
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        return None, f"framework operations: {SWITCH} is off"
    try:
        library, how = _compiled()
        kernel = DigestKernel(library)
        if not kernel.agrees():
            return None, f"framework operations: {how} gives other numbers than the definition"
        kernel.use_threads(threads if kernel.shares() else 1)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        return None, f"framework operations: no kernel could be compiled ({reason})"
    return kernel, f"compiled by {how}"


def threads_here() -> int:
    """Return how many threads take a large tensor: the processors, divided among the ranks of the machine."""
    asked = os.environ.get(THREADS, "")
    if asked:
        if not asked.isascii() or not asked.isdigit() or int(asked) < 1:
            raise ConfigError("no number of threads", where=THREADS, found=asked, expected="1 or more")
        return int(asked)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    said = next((os.environ[name] for name in _RANKS_HERE if os.environ.get(name, "").isdigit()), "1")
    return max(1, min(MOST_THREADS, processors // max(1, int(said))))


def digest_on_host(
    host: HostTensor, *, statistics: bool, sketch: bool = False, part: Part | None = None
) -> Digest:
    """Return what ``record.statistics.digest_host`` does, by the kernel where there is one.

    Args:
        host: the tensor.
        statistics: also the moments.
        sketch: also the sketch.
        part: what it holds of a canonical tensor; None: it is whole.

    Raises:
        IncomparableError: more than fingerprints was asked for and the element type has no known numbers.
    """
    kernel, _ = digest_kernel()
    reading, bits = KINDS.get(_COMPONENTS.get(host.dtype, host.dtype)), host.bits
    if kernel is None or reading is None or bits.ndim >= MAX_DIMS:
        index = None if part is None else canonical_index(part)
        return digest_host(host, statistics=statistics, sketch=sketch, index=index)
    sketch = sketch and statistics and has_sketch(host.dtype, bits.size)
    geometry = geometry_of(bits, reading, part)
    return kernel.digest(bits.ctypes.data, geometry, statistics=statistics, sketch=sketch)


def _compiled() -> tuple[Path, str]:
    """Return the shared object, compiled now if this machine has not yet, and what compiled it.

    Raises:
        OSError: no compiler is found, or none can compile it.
    """
    names = [os.environ["CC"]] if os.environ.get("CC") else list(COMPILERS)
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise OSError(f"none of {', '.join(names)} is installed")
    directory, failure = _cache(), ""
    text = b"".join(part.read_bytes() for part in (SOURCE, *INCLUDED)) + _processor() + compiler.encode()
    key = hashlib.blake2b(text, digest_size=8).hexdigest()
    for target in TARGET_FLAGS:
        flags = [*BASE_FLAGS, *target]
        library = directory / f"digest-{key}-{len(target)}{'m' if '-mcpu=native' in target else ''}.so"
        if not library.exists():
            failure = _compile(compiler, flags, library)
        if library.exists():
            return library, " ".join([Path(compiler).name, *target])
    raise OSError(failure)


def _compile(compiler: str, flags: Sequence[str], library: Path) -> str:
    """Compile under another name and rename: several ranks may do this at once. Return what went wrong."""
    handle, part = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, f"-I{INCLUDED[0].parent}", str(SOURCE), "-o", part],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode == 0:
            Path(part).replace(library)
        return (done.stderr.strip().splitlines() or [f"{compiler} ended with {done.returncode}"])[0]
    finally:
        Path(part).unlink(missing_ok=True)


def _cache() -> Path:
    """Return a directory of this user alone: what lies there is loaded into the process."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        directory = (Path(home) if home else Path.home() / ".cache") / "mindspeed-precision"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022 and os.access(directory, os.W_OK):
            return directory
    except (OSError, RuntimeError):  # no home
        pass
    return Path(tempfile.mkdtemp(prefix="mindspeed-precision-"))


def _processor() -> bytes:
    """Return what tells processors apart that share a home directory."""
    described = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        wanted = ("flags", "Features", "model name", "CPU part")
        described += sorted({line for line in lines if line.startswith(wanted)})
    except OSError:
        pass
    return "\n".join(described).encode()
