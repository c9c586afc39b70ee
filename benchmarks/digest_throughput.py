"""How fast a digest is, as a fraction of a plain read of the same memory. Run by ``make bench``.

The plain read is the sum of the same bytes as words of 64 bits, in C, compiled as the kernel is: nothing
that looks at every byte is faster. "again" is a tensor that still has the bits of its last digest. All are
taken in turn, by one thread, and the best of several times is printed: what else runs on the machine only
adds. "threads" and "again, thr." are taken by as many threads as a training would have, on the clock: they
tell something where that many processors are free. Torch's operations, which stand in for the kernel where
there is no compiler, are measured by the smaller tensor alone.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from plain_read import plain_read

from mindspeed_precision.backends import digest_kernel as kernels
from mindspeed_precision.backends.digest_geometry import Geometry, Reading, reading_of
from mindspeed_precision.backends.digest_words import WORDS_WITH_SKETCH
from mindspeed_precision.backends.torch import TorchBackend

REPEATS = 9
LARGE, SMALL = 64 << 20, 1 << 20
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
LEVELS = {"fingerprint": (False, False), "statistics": (True, False), "sketch": (True, True)}


def _reading(name: str, dtype: torch.dtype) -> Reading:
    table = None
    if dtype.itemsize == 1:
        table = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    return reading_of(name, width=dtype.itemsize, numbers=table, floating=True)


def _best(
    calls: dict[str, Callable[[], object]], times: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Return the best time of each call, in seconds of CPU or of ``clock``, taken in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = clock()
            for _ in range(times):
                call()
            best[name] = min(best[name], (clock() - start) / times)
    return best


def _best_of_threads(
    kernel: kernels.DigestKernel, into: Callable[[], object], again: Callable[[], object], times: int
) -> dict[str, float]:
    """Return the best time of a digest with statistics and of one looked at again, by several threads."""
    kernel.use_threads(kernels.threads_here())
    best = _best({"threads": into, "again, thr.": again}, times, time.perf_counter)
    kernel.use_threads(1)
    return best


def _row(name: str, size: int, what: str, seconds: float, plain: float) -> None:
    sys.stdout.write(
        f"{name:26} {size / 2**20:6.1f} {what:>12} {size / seconds / 1e9:6.2f} {size / plain / 1e9:10.2f} "
        f"{plain / seconds:8.2f}\n"
    )
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    kernel, how = kernels.digest_kernel()
    if kernel is not None:
        how += f"; {kernels.threads_here()} threads"
        kernel.use_threads(1)
    sys.stdout.write(
        f"{how}\n{'':26} {'MiB':>6} {'level':>12} {'GB/s':>6} {'plain read':>10} {'fraction':>8}\n"
    )
    if kernel is None:
        return
    output = (ctypes.c_uint64 * WORDS_WITH_SKETCH)()
    with plain_read() as plain:
        for size in (LARGE, SMALL):
            for name, dtype in DTYPES.items():
                tensor = torch.randn(size // dtype.itemsize).to(dtype)
                geometry = Geometry((tensor.numel(),), (1,), _reading(name, dtype))
                address = tensor.data_ptr()
                into = partial(kernel.into, address, geometry, ctypes.addressof(output))
                calls: dict[str, Callable[[], object]] = {"": partial(plain, address, size // 8)}
                for level, (moments, sketch) in LEVELS.items():
                    calls[level] = partial(into, statistics=moments, sketch=sketch)
                calls["again"] = partial(kernel.repeats, address, geometry, ctypes.addressof(output))
                if size == SMALL:
                    by_torch = partial(TorchBackend(kernel=False).begin_digest, tensor)
                    calls["torch"] = partial(by_torch, statistics=False)
                    calls["torch, stat."] = partial(by_torch, statistics=True)
                times = max(1, (16 << 20) // size)
                best = _best(calls, times)
                best |= _best_of_threads(kernel, calls["statistics"], calls["again"], times)
                for level in list(best)[1:]:
                    _row(name, size, level, best[level], best[""])


if __name__ == "__main__":
    main()
