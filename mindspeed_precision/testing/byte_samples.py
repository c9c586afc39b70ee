"""Real text as training data, in numpy: windows over the bytes of a file, in a seeded order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEXT = Path(__file__).parent / "demo" / "text.txt"
BYTE_VALUES = 256


class ByteSamples:
    """Windows of ``seq_length + 1`` bytes of a text, in an order that the seed and the epoch decide.

    It knows no framework, so that runs on different ones train on the same bytes.

    Args:
        seq_length: tokens of a sample; the labels are the same bytes shifted by one.
        samples: how many samples there are; the text is gone through as often as that takes.
        seed: of the order.
        text: the file to read.
    """

    def __init__(self, *, seq_length: int, samples: int, seed: int, text: Path = TEXT) -> None:
        self.bytes = np.frombuffer(text.read_bytes(), dtype=np.uint8).astype(np.int64)
        self.seq_length = seq_length
        self.samples = samples
        self.seed = seed
        # windows overlap by three quarters: a small file gives more of them
        self.starts = np.arange(0, len(self.bytes) - seq_length, max(1, seq_length // 4))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Return ``tokens labels position_ids`` (int64) and ``loss_mask`` (float32), each ``[s]``."""
        epoch, position = divmod(int(index), len(self.starts))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.starts))
        start = int(self.starts[order[position]])
        window = self.bytes[start : start + self.seq_length + 1].copy()
        return {
            "tokens": window[:-1].copy(),
            "labels": window[1:].copy(),
            "loss_mask": np.ones(self.seq_length, dtype=np.float32),
            "position_ids": np.arange(self.seq_length, dtype=np.int64),
        }

    def microbatch(self, number: int, size: int) -> dict[str, NDArray[Any]]:
        """Return the samples ``[number * size, (number + 1) * size)``, stacked: ``[b, s]`` each.

        It is what Megatron's sequential sampler gives the only data-parallel rank as its microbatch
        ``number``, counted over all steps.
        """
        chosen = [self[index] for index in range(number * size, (number + 1) * size)]
        return {key: np.stack([sample[key] for sample in chosen]) for key in chosen[0]}
