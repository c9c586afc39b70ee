"""Batches in the order in which Megatron's sequential sampler takes samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class SequentialSampler:
    """Yields the sample ids of each microbatch of one data-parallel rank: a list of ``micro_batch_size``.

    Consecutive samples are dealt to the ranks in blocks of ``micro_batch_size``, as
    ``MegatronPretrainingSampler`` does.

    Args:
        samples: how many there are.
        micro_batch_size: of one rank.
        data_parallel_rank: this rank's place.
        data_parallel_size: ranks that share a step.
    """

    def __init__(
        self, *, samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
    ) -> None:
        self.samples = samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        width = self.micro_batch_size * self.data_parallel_size
        own = self.data_parallel_rank * self.micro_batch_size
        for start in range(0, self.samples - width + 1, width):
            yield list(range(start + own, start + own + self.micro_batch_size))


def batches(dataset: Any, sampler: SequentialSampler) -> Iterator[dict[str, Any]]:
    """Yield microbatches: every entry of the samples stacked to ``[b, ...]``."""
    for ids in sampler:
        samples = [dataset[index] for index in ids]
        yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
