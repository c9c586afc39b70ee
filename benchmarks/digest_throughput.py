"""How fast a digest is, as a fraction of a plain read of the same memory. Run by ``make bench``.

The plain read is the sum of the same bytes as int64: nothing that looks at every byte is faster. Both are
taken in turn, in CPU time of the thread, and the median of their ratios is printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from mindspeed_precision.backends import load_backend

BACKEND = load_backend("torch")
REPEATS = 5
CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda values: values,
    "float32, transposed": lambda values: values.view(-1, 1024).t(),
    "bfloat16": lambda values: values.bfloat16(),
    "float64": lambda values: values.double(),
}
LEVELS = {
    "fingerprint": {"statistics": False},
    "statistics": {"statistics": True},
    "sketch": {"statistics": True, "sketch": True},
}


def _seconds(call: Callable[[], object], calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    sys.stdout.write(
        f"{'':22} {'MiB':>6} {'level':>12} {'GB/s':>6} {'plain read GB/s':>15} {'fraction':>8}\n"
    )
    for size in (64 << 20, 1 << 20):
        for name, make in CASES.items():
            tensor = make(torch.randn(size // 4))
            flat = tensor.untyped_storage().nbytes()
            words = torch.empty(0, dtype=torch.int64).set_(tensor.untyped_storage())
            calls = max(1, (8 << 20) // flat)
            for level, wanted in LEVELS.items():
                pairs = []
                for _ in range(REPEATS):
                    plain = _seconds(words.sum, calls)
                    pairs.append((plain, _seconds(partial(BACKEND.begin_digest, tensor, **wanted), calls)))
                fraction = statistics.median(plain / ours for plain, ours in pairs)
                plain, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
                sys.stdout.write(
                    f"{name:22} {flat / 2**20:6.0f} {level:>12} {flat / ours / 1e9:6.2f} "
                    f"{flat / plain / 1e9:15.2f} {fraction:8.2f}\n"
                )


if __name__ == "__main__":
    main()
