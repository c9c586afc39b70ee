"""The plain read of memory that digests are held against, alone and in place of the digests of a training."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_precision.backends import digest_kernel as kernels
from mindspeed_precision.backends.digest_geometry import Geometry
from mindspeed_precision.backends.digest_words import WORDS

PlainRead = Callable[[int, int], object]


@contextmanager
def plain_read() -> Iterator[PlainRead]:
    """Compile the plain read and yield it: address and number of words of 64 bits."""
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(__file__).with_name("plain_read.c"), Path(directory) / "plain_read.so"
        flags = kernels.BASE_FLAGS
        if platform.machine() == "x86_64":
            flags = (*flags, "-march=native")
        subprocess.run([os.environ.get("CC", "cc"), *flags, source, "-o", library], check=True)
        found = ctypes.CDLL(str(library)).plain_read
        found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
        yield found


@contextmanager
def reading_only() -> Iterator[None]:
    """Record as ever, but only read each tensor of 4 KiB or more in place of its digest; records are wrong.

    Nothing that looks at every byte of what it records, from the same places, costs less.
    """
    kernel: Any = kernels.DigestKernel
    into, repeats = kernel.into, kernel.repeats
    with plain_read() as read:

        def read_into(self: Any, address: int, geometry: Geometry, out: int, **wanted: bool) -> None:
            if geometry.identity is None:
                into(self, address, geometry, out, **wanted)
            else:
                ctypes.memset(out, 0, WORDS * 8)
                read(address, geometry.numel * geometry.reading.width // 8)

        def read_again(self: Any, address: int, geometry: Geometry, prior: int) -> bool:
            read(address, geometry.numel * geometry.reading.width // 8)
            return True

        kernel.into, kernel.repeats = read_into, read_again
        try:
            yield
        finally:
            kernel.into, kernel.repeats = into, repeats
