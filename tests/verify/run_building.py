"""Runs put together record by record, on disk, with the digests that a recorder would write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    NO_MICROBATCH,
    Layout,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
)
from mindspeed_precision.verify.check import check_run


def ranks(world=1, **sizes) -> list[RankCoordinates]:
    """Return the coordinates of ``world`` ranks in Megatron's order: TP fastest, then DP, then PP."""
    tp, pp = sizes.get("tp_size", 1), sizes.get("pp_size", 1)
    dp = world // (tp * pp)
    return [
        RankCoordinates(
            rank=number,
            world_size=world,
            tp_size=tp,
            pp_size=pp,
            dp_size=dp,
            tp_rank=number % tp,
            dp_rank=number // tp % dp,
            pp_rank=number // (tp * dp),
        )
        for number in range(world)
    ]


def dense(shape) -> Layout:
    """Return the layout of a contiguous tensor."""
    steps = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    return Layout(stride=tuple(steps))


class RunBuilder:
    """Records of several ranks, in the order in which they are added; ``write`` puts them on disk.

    Args:
        coordinates: of the ranks.
        keep: keep the elements of every record.
        parameters: names of parameters that every rank declares, of shape [4]; or shapes by name.
        modules: of every rank's ``effective.json``.
        dtype: of those.
        microbatches: of every step.
        config: effective configuration in the manifest.
        manifest: further entries of it.
    """

    def __init__(
        self,
        coordinates=None,
        *,
        keep=False,
        parameters=("w",),
        dtype="float32",
        microbatches=1,
        config=None,
        modules=(),
        manifest=None,
    ):
        self.coordinates = coordinates or ranks()
        self._keep = keep
        self._parameters = parameters if isinstance(parameters, dict) else dict.fromkeys(parameters, (4,))
        self._modules = list(modules)
        self._dtype = dtype
        self._microbatches = microbatches
        self._config = config or {}
        self._manifest = manifest or {}
        self._records = [[] for _ in self.coordinates]
        self._hosts = [{} for _ in self.coordinates]
        self.incomplete = set()

    def add(
        self,
        role,
        phase,
        fqn,
        value,
        *,
        rank=None,
        step=0,
        microbatch=NO_MICROBATCH,
        slot="",
        layout=None,
        occurrence=0,
        recomputed=False,
        dtype=None,
        note="",
    ):
        """Record an array on one rank, or (None) on all."""
        value = np.asarray(value)
        bits = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}").reshape(value.shape)
        host = HostTensor(bits=bits, dtype=dtype or str(value.dtype))
        for number in range(len(self.coordinates)) if rank is None else (rank,):
            seq = len(self._records[number])
            key = RecordKey(
                step=step,
                microbatch=microbatch,
                phase=Phase(phase),
                fqn=fqn,
                role=Role(role),
                slot=slot,
                occurrence=occurrence,
                recomputed=recomputed,
            )
            self._records[number].append(
                TensorRecord(
                    seq=seq,
                    key=key,
                    shape=value.shape,
                    dtype=host.dtype,
                    layout=layout or dense(value.shape),
                    digest=digest_host(host, statistics=True),
                    note=note,
                )
            )
            if self._keep:
                self._hosts[number][seq] = host
        return self

    def write(self, directory: Path) -> Run:
        """Write the run; steps are marked in the order of their numbers."""
        create_run(directory, {"config": self._config, "settings": {}, **self._manifest})
        for number, where in enumerate(self.coordinates):
            self._write_rank(directory, number, where)
        return load_run(directory)

    def _write_rank(self, directory, number, where):
        writer = RankWriter(directory, coordinates=where)
        writer.declare_parameters(
            [
                ParameterDeclaration(fqn=name, shape=shape, dtype=self._dtype, trainable=True)
                for name, shape in self._parameters.items()
            ]
        )
        if self._modules:
            writer.write_effective({"groups": [], "tied": {}, "modules": self._modules})
        records, next_seq = self._records[number], 0
        for step in sorted({record.key.step for record in records}):
            chosen = [record for record in records if record.key.step == step]
            placed = [replace(record, seq=next_seq + i) for i, record in enumerate(chosen)]
            kept = {
                new.seq: self._hosts[number][old.seq]
                for new, old in zip(placed, chosen, strict=True)
                if old.seq in self._hosts[number]
            }
            writer.write_step(step, placed, kept, microbatches=self._microbatches)
            next_seq += len(placed)
        writer.close(complete=number not in self.incomplete)


def findings_of(run, *ids):
    """Return what ``check`` finds in a run, by id; of the given ids alone where some are given."""
    found = {finding.id: finding for finding in check_run(run).findings}
    return {name: finding for name, finding in found.items() if name in ids} if ids else found


def outcome_of(run, name):
    """Return what one check of a run looked at."""
    return next(one for one in check_run(run).outcomes if one.name == name)
