"""Real text as training data for torch: windows over the bytes of a file, in a seeded order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mindspeed_precision.testing.byte_samples import BYTE_VALUES, TEXT, ByteSamples

__all__ = ["BYTE_VALUES", "TEXT", "ByteWindows"]


class ByteWindows(torch.utils.data.Dataset[dict[str, Any]]):
    """``ByteSamples`` as tensors.

    Args:
        seq_length: tokens of a sample; the labels are the same bytes shifted by one.
        samples: how many samples there are; the text is gone through as often as that takes.
        seed: of the order.
        text: the file to read.
    """

    def __init__(self, *, seq_length: int, samples: int, seed: int, text: Path = TEXT) -> None:
        self.arrays = ByteSamples(seq_length=seq_length, samples=samples, seed=seed, text=text)
        self.starts = self.arrays.starts

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens labels position_ids`` (int64) and ``loss_mask`` (float32), each ``[s]``."""
        return {key: torch.from_numpy(array) for key, array in self.arrays[index].items()}
