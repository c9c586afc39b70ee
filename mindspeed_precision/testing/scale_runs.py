"""Synthetic runs of thousands of ranks, written fast: no number is computed, but bits flow as they would.

For the benchmark of `compare` and for its tests. Every rank of a tensor, pipeline and data parallel layout
writes the records of its stage of a transformer at the level of fingerprints: forward, loss, backward, dW at
the GEMM and at the parameter, accumulation, reduction, clipping, AdamW. What is a copy of another tensor has
its bits; a planted fault changes the bits of what it is and of all that would be computed from it::

    write_scale_run(tmp_path / "baseline", ScaleRun(tp=2, pp=2, dp=4))
    write_scale_run(tmp_path / "candidate", ScaleRun(tp=2, pp=2, dp=4, fault=Fault(step=1, dp=2)))

The files are what ``dump.writer`` writes, byte for byte; a test holds one against the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.dump.encode import digest_text
from mindspeed_precision.dump.format import (
    COMPLETE,
    DIGEST_ALGORITHM,
    EFFECTIVE,
    INDEX,
    SCHEMA,
    Header,
    Parameters,
    StepMarker,
    rank_directory,
    to_json,
)
from mindspeed_precision.dump.writer import create_run
from mindspeed_precision.record.statistics import digest_number
from mindspeed_precision.records import INIT_STEP, Digest, ParameterDeclaration, RankCoordinates
from mindspeed_precision.testing.scale_stage import Reach, Seen, Stage, order_of_fault, ranged, stage_of

Words = NDArray[np.uint64]

DIGITS = 16
"""Of a fingerprint."""

_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_TENSOR = digest_text(Digest(fingerprint=0, unordered=0))
_FIRST = _TENSOR.index("0" * DIGITS)
_SECOND = _TENSOR.rindex("0" * DIGITS)
_SCALARS = 512
"""How many losses there are."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One record that one rank computes otherwise: the output of ``mlp.linear_fc1`` of a layer.

    Attributes:
        step: in this step, and microbatch 0.
        tp: tensor-parallel rank.
        dp: data-parallel rank.
        layer: global number; its stage has it.
    """

    step: int
    tp: int = 0
    dp: int = 0
    layer: int = 0


@dataclass(frozen=True, kw_only=True)
class ScaleRun:
    """What is written.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        dp: data-parallel size.
        layers: of each stage.
        microbatches: of each step.
        steps: training steps.
        hidden: width of the model; of nothing but the shapes.
        fault: None: a healthy run.
        distributed: the optimizer is: each data-parallel rank has a range of the stage's parameters.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    layers: int = 1
    microbatches: int = 2
    steps: int = 2
    hidden: int = 64
    fault: Fault | None = None
    distributed: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return where a rank sits: tensor parallel fastest, then data, then pipeline, as in Megatron."""
        return RankCoordinates(
            rank=rank,
            world_size=self.world,
            tp_rank=rank % self.tp,
            tp_size=self.tp,
            dp_rank=rank // self.tp % self.dp,
            dp_size=self.dp,
            pp_rank=rank // (self.tp * self.dp),
            pp_size=self.pp,
        )


def write_scale_run(
    directory: Path, run: ScaleRun, *, jobs: int = 1, like: tuple[Path, ScaleRun] | None = None
) -> Path:
    """Write a run.

    Args:
        directory: new or empty.
        run: what to write.
        jobs: processes.
        like: a run that was written and what it is of; ranks with the same bits are hard links to its files.

    Returns:
        ``directory``.
    """
    create_run(directory, _manifest(run))
    tasks = [(directory, run, stage, tp, like) for stage in range(run.pp) for tp in range(run.tp)]
    if jobs == 1:
        for task in tasks:
            _write_column(*task)
        return directory
    with ProcessPoolExecutor(jobs) as pool:
        for done in [pool.submit(_write_column, *task) for task in tasks]:
            done.result()
    return directory


def records_per_step(run: ScaleRun) -> float:
    """Return how many records a rank has in a step, on the average over the stages."""
    stages = [_stage(run, pp) for pp in range(run.pp)]
    if not run.distributed:
        return sum(len(stage.step) for stage in stages) / run.pp
    return sum(len(ranged(s, run.dp, dp).step) for s in stages for dp in range(run.dp)) / run.pp / run.dp


def _manifest(run: ScaleRun) -> dict[str, Any]:
    arguments = {
        "lr": 1e-4,
        "weight_decay": 0.1,
        "micro_batch_size": 1,
        "global_batch_size": run.microbatches * run.dp,
        "num_layers": run.layers * run.pp,
        "hidden_size": run.hidden,
        "seed": 1,
    }
    return {
        "created": "2026-01-01T00:00:00+00:00",
        "package_version": "0.1.0",
        "framework": {"name": "numpy", "version": np.__version__},
        "versions": {"numpy": np.__version__},
        "parallel": run.coordinates(0).sizes(),
        "settings": {"capture": {"level": "fingerprint", "rules": []}, "remedies": []},
        "config": {
            "megatron_args": arguments,
            "transformer_config": {},
            "ddp_config": {},
            "optimizer_config": {},
        },
        "environment": {},
        "numerics": {"num_threads": 1, "deterministic_algorithms": True, "device": "cpu"},
        "patches": [],
        "remedies": [],
        "findings": [],
        "label": "synthetic run, no training",
    }


def _write_column(
    directory: Path, run: ScaleRun, pp: int, tp: int, like: tuple[Path, ScaleRun] | None
) -> None:
    """Write the ranks of a stage and tensor-parallel rank: their lines are alike but for bits and ranges."""
    stage = _stage(run, pp)
    form = _Form(run, stage, tp)
    same = like is not None and run == like[1]
    for dp in range(run.dp):
        rank = (pp * run.dp + dp) * run.tp + tp
        target = directory / rank_directory(rank)
        target.mkdir()
        if like is not None and same:
            for file in (like[0] / target.name).iterdir():
                os.link(file, target / file.name)
        elif run.distributed:
            _write_rank(target, run, _Form(run, ranged(stage, run.dp, dp), tp), rank)
        else:
            _write_rank(target, run, form, rank)


def _write_rank(target: Path, run: ScaleRun, form: _Form, rank: int) -> None:
    where = run.coordinates(rank)
    data = f"{to_json(Header(coordinates=where))}\n".encode() + form.parameters + form.filled(where)
    (target / INDEX).write_bytes(data)
    (target / EFFECTIVE).write_text(form.effective)
    seal = {"schema": SCHEMA, "lines": data.count(b"\n"), "algorithm": DIGEST_ALGORITHM}
    seal["digest"] = hashlib.blake2b(data, digest_size=16).hexdigest()
    (target / COMPLETE).write_text(json.dumps(seal) + "\n")


def _stage(run: ScaleRun, pp: int) -> Stage:
    return stage_of(
        first=pp * run.layers,
        layers=run.layers,
        last=pp == run.pp - 1,
        hidden=run.hidden,
        tp=run.tp,
        microbatches=run.microbatches,
    )


class _Form:
    """The lines of all ranks of one stage and tensor-parallel rank, with room for the bits.

    Args:
        run: what is written.
        stage: its records.
        tp: the tensor-parallel rank.
    """

    def __init__(self, run: ScaleRun, stage: Stage, tp: int) -> None:
        declared = stage.declared(tp, run.tp)
        self.parameters = f"{to_json(Parameters(parameters=declared))}\n".encode()
        self.effective = json.dumps(_effective(declared, stage.ranges), indent=1) + "\n"
        self._run = run
        pieces: list[str] = []
        shown: list[tuple[Seen, int, int]] = []
        length, seq = 0, 0
        for step in range(INIT_STEP, run.steps):
            records = stage.init if step == INIT_STEP else stage.step
            for seen in records:
                before, after = seen.text(seq, step)
                seq, length = seq + 1, length + len(before)
                pieces += (before, after)
                if seen.number is None:
                    room = _scalar(0) if seen.scalar else _TENSOR
                    shown.append((replace(seen, key=replace(seen.key, step=step)), length, len(room)))
                    pieces.insert(-1, room)
                    length += len(room)
                length += len(after)
            count = len(records)
            marker = to_json(
                StepMarker(step=step, records=count, payloads=0, problems=0, microbatches=run.microbatches)
            )
            pieces.append(f"{marker}\n")
            length += len(pieces[-1])
        self._lines = np.frombuffer("".join(pieces).encode(), np.uint8)
        self._of_shown([(seen, place) for seen, place, _ in shown])

    def _of_shown(self, shown: Sequence[tuple[Seen, int]]) -> None:
        seen = [one for one, _ in shown]
        self._place = np.array([place for _, place in shown], np.int64)
        self._value = np.array([_number(one.value) for one in seen], np.uint64)
        self._step = np.array([one.key.step for one in seen], np.int64)
        self._microbatch = np.array([one.microbatch for one in seen], np.int64)
        self._order = np.array([one.order for one in seen], np.int64)
        self._reach = np.array([one.reach for one in seen], np.int64)
        self._of_data = np.array([one.of_data for one in seen], np.bool_)
        self._sharded = np.array([one.sharded for one in seen], np.bool_)
        self._scalar = np.array([one.scalar for one in seen], np.bool_)
        self._zero = np.array([one.value.startswith("zeros") for one in seen], np.bool_)

    def filled(self, where: RankCoordinates) -> bytes:
        """Return the lines of a rank."""
        bits = self._value + np.uint64(0x9E37) * (self._step + 2).astype(np.uint64)
        bits = _mixed(bits + np.uint64(0x79B9) * (self._microbatch + 2).astype(np.uint64))
        bits[self._of_data] += np.uint64(7 * (where.dp_rank + 1))
        bits[self._sharded] += np.uint64(0x100000 * (where.tp_rank + 1))
        bits[self._touched(where)] ^= np.uint64(1 << 40)
        first = _mixed(bits)
        first[self._zero] = 0
        second = np.where(self._zero, np.uint64(0), _mixed(first))
        lines = self._lines.copy()
        tensors = ~self._scalar
        at = self._place[tensors][:, None] + np.arange(DIGITS)
        for offset, words in ((_FIRST, first), (_SECOND, second)):
            lines[at + offset] = _digits(words[tensors])
        for place, number in zip(self._place[self._scalar], first[self._scalar], strict=True):
            text = _scalar(int(number) % _SCALARS)
            lines[place : place + len(text)] = np.frombuffer(text.encode(), np.uint8)
        return lines.tobytes()

    def _touched(self, where: RankCoordinates) -> NDArray[np.bool_]:
        """Tell which records of a rank have other bits by the fault."""
        fault, reach = self._run.fault, self._reach
        if fault is None:
            return np.zeros(len(reach), np.bool_)
        at = order_of_fault(fault.layer)
        behind = (self._order > at) | ((self._order == at) & (where.tp_rank == fault.tp))
        here = np.full(len(reach), where.dp_rank == fault.dp)
        first = here & (self._microbatch == 0)
        in_step = (
            ((reach == Reach.FORWARD) & first & behind)
            | ((reach == Reach.BACKWARD) & first)
            | ((reach == Reach.SUM) & here)
            | (reach == Reach.STEP)
        )
        later = (self._step > fault.step) & (reach != Reach.NEVER)
        touched: NDArray[np.bool_] = later | ((self._step == fault.step) & in_step)
        return touched


def _mixed(words: Words) -> Words:
    """Return numbers without a pattern: the finaliser of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _digits(words: Words) -> NDArray[np.uint8]:
    """Return ``[n, 16]`` hexadecimal digits of ``[n]`` words."""
    octets = words.astype(">u8").view(np.uint8).reshape(-1, 8)
    return _HEX[np.stack([octets >> 4, octets & 15], axis=-1).reshape(-1, DIGITS)]


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


@cache
def _scalar(number: int) -> str:
    """Return the digest of one of some losses whose texts are all of one length."""
    return digest_text(digest_number(2 + (2 * number + 1) / (2 * _SCALARS)))


def _effective(
    declared: Sequence[ParameterDeclaration], ranges: Mapping[str, tuple[int, int]] | None
) -> dict[str, Any]:
    settings = {"lr": 1e-4, "weight_decay": 0.1, "eps": 1e-8, "beta1": 0.9, "beta2": 0.95}
    members = [
        {"fqn": p.fqn, "dtype": p.dtype, "copy": False, "range": None if ranges is None else [*ranges[p.fqn]]}
        for p in declared
        if ranges is None or p.fqn in ranges
    ]
    group = {"optimizer": "AdamW", "settings": settings, "parameters": members}
    return {"schema": SCHEMA, "groups": [group], "tied": {}, "modules": []}
