"""Every reader of something that others wrote, with a healthy file to begin from. A new reader is one line.

``READERS`` maps a name to ``Reader(file, seeds, read)``: ``seeds(directory)`` makes healthy files; ``file``
is the one that is spoilt, relative to the directory; ``read(directory)`` reads it as the product does.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_precision.align.mapping import load_mapping
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.capture import layout_rules
from mindspeed_precision.ckpt import open_checkpoint
from mindspeed_precision.compare.policy import load_policy
from mindspeed_precision.config import load_settings
from mindspeed_precision.dump.payload import write_payload
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.evaluation.reading import read_results
from mindspeed_precision.launches import read_launch
from mindspeed_precision.msprobe.config import load_config
from mindspeed_precision.msprobe.reader import load_dump
from mindspeed_precision.msprobe.torch_file import read_torch_file
from mindspeed_precision.patching import declare
from mindspeed_precision.records import Digest, Phase, RankCoordinates, RecordKey, Role, TensorRecord
from mindspeed_precision.samples.indexed import open_indexed
from mindspeed_precision.testing.fake_runs import FakeRun, write_fake_run
from mindspeed_precision.verify.aliases import read_configuration
from mindspeed_precision.verify.check import check_run

ROOT = Path(__file__).resolve().parents[2]

Read = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader.

    Attributes:
        file: what is spoilt, relative to the directory.
        seeds: fills an empty directory with healthy files.
        read: reads them.
        share: of all inputs, by weight; what is slow gets less.
    """

    file: str
    seeds: Callable[[Path], object]
    read: Read
    share: int = 4


def small_run(directory: Path) -> None:
    """A sealed run of one step: three records, one of them with elements."""
    create_run(directory / "run", {"parallel": {"world_size": 1}, "settings": {}, "findings": []})
    writer = RankWriter(directory / "run", coordinates=RankCoordinates())
    records = [
        TensorRecord(
            seq=seq,
            key=RecordKey(step=0, microbatch=0, phase=Phase.FPROP, fqn=f"layer.{seq}", role=Role.OUTPUT),
            shape=(2, 2),
            dtype="float32",
            layout=None,
            digest=Digest(fingerprint=seq, unordered=seq),
        )
        for seq in range(3)
    ]
    elements = {1: HostTensor(bits=np.arange(4, dtype=np.uint32).reshape(2, 2), dtype="float32")}
    writer.write_step(0, records, elements, microbatches=1)
    writer.write_findings([{"id": "rng.x", "severity": "warning", "title": "t", "evidence": ["e"]}])
    writer.close(complete=True)


def unsealed_run(directory: Path) -> None:
    """The same without its seal: nothing tells that the index was changed."""
    small_run(directory)
    (directory / "run" / "rank00000" / "COMPLETE").unlink()


def trained_run(directory: Path) -> None:
    """A run with everything that a training leaves."""
    write_fake_run(directory / "run", FakeRun(steps=1, microbatches=1))


def read_run(directory: Path) -> None:
    """Read records and elements."""
    for rank in load_run(directory / "run").ranks.values():
        for record in rank.records:
            if record.payload is not None:
                rank.payload(record)


def check(directory: Path) -> None:
    """Ask everything that is asked of one run."""
    check_run(directory / "run")


def shipped(*parts: str, name: str = "file.yaml") -> Callable[[Path], object]:
    """Return what copies a file of this repository to ``name``."""
    return lambda directory: shutil.copy(ROOT.joinpath(*parts), directory / name)


def written(name: str, text: str) -> Callable[[Path], object]:
    """Return what writes a file."""
    return lambda directory: (directory / name).write_text(text)


def kept(*parts: str, name: str) -> Callable[[Path], object]:
    """Return what copies a directory of the tests' golden files to ``name``."""
    return lambda directory: shutil.copytree(ROOT.joinpath("tests", *parts), directory / name)


def read_dump(directory: Path) -> None:
    """Read a dump of msprobe, its elements too."""
    for rank in load_dump(directory / "dump").ranks.values():
        for record in rank.records:
            if record.payload is not None:
                rank.payload(record)


def read_dumped_tensor(directory: Path) -> None:
    """Read a dump, which leaves out and names a file that cannot be read, and then the file by itself."""
    read_dump(directory)
    read_torch_file(directory / _DUMPED)


def read_checkpoint(directory: Path) -> None:
    """Read every tensor of a checkpoint."""
    found = open_checkpoint(directory / "checkpoint")
    for table in (found.tensors, found.loose, *found.states.values()):
        for tensor in table.values():
            tensor.bits()


def written_weights(directory: Path) -> None:
    """A directory of safetensors."""
    (directory / "checkpoint").mkdir()
    elements = np.arange(24, dtype=np.uint32).reshape(4, 6)
    tables = {"model.norm.weight": HostTensor(bits=elements, dtype="float32")}
    write_payload(directory / "checkpoint" / "model.safetensors", tables)


def written_dataset(directory: Path) -> None:
    """An indexed data set of Megatron: two documents of int32 tokens."""
    lengths, starts, bounds = np.array([3, 5], "<i4"), np.array([0, 12], "<i8"), np.array([0, 1, 2], "<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 2, 3)
    (directory / "data.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + bounds.tobytes())
    (directory / "data.bin").write_bytes(np.arange(8, dtype="<i4").tobytes())


def read_dataset(directory: Path) -> None:
    """Read every sequence."""
    data = open_indexed(directory / "data.idx")
    for number in range(len(data)):
        data.sequence(number)


_RESULTS = '{"results": {"mmlu": {"acc,none": 0.5, "acc_stderr,none": 0.01, "alias": "mmlu"}}}'
_MSPROBE = """{"task": "statistics", "dump_path": "out", "rank": [0], "step": [0, "2-4"], "level": "mix",
 "statistics": {"scope": [], "list": ["linear"], "data_mode": ["all"], "summary_mode": "md5"}}"""

_LAUNCH = """#!/bin/bash
TP=2
ARGS="--tensor-model-parallel-size $TP \\
  --lr 1.0e-4 --bf16"
if [ "$TP" -gt 1 ]; then ARGS="$ARGS --sequence-parallel"; fi
export HCCL_DETERMINISTIC=true
torchrun --nproc_per_node ${NPROC:-8} pretrain_gpt.py $ARGS ${EXTRA[@]} "$@" | tee log.txt
"""

_DUMP = ("msprobe", "golden", "torch-L0-tensor-statistics")
_DUMPED = "dump/step0/proc0/dump_tensor_data/Module.fc1.Linear.forward.0.input.0.pt"

READERS = {
    "run.json": Reader(file="run/run.json", seeds=small_run, read=read_run),
    "index.jsonl": Reader(file="run/rank00000/index.jsonl", seeds=unsealed_run, read=read_run, share=10),
    "index.jsonl, sealed": Reader(file="run/rank00000/index.jsonl", seeds=small_run, read=read_run, share=2),
    "COMPLETE": Reader(file="run/rank00000/COMPLETE", seeds=small_run, read=read_run, share=2),
    "findings.json": Reader(file="run/rank00000/findings.json", seeds=small_run, read=read_run, share=2),
    "payload": Reader(
        file="run/rank00000/step000000.mb000.safetensors", seeds=small_run, read=read_run, share=10
    ),
    "effective.json": Reader(file="run/rank00000/effective.json", seeds=trained_run, read=read_run, share=1),
    "run.json, checked": Reader(file="run/run.json", seeds=trained_run, read=check, share=1),
    "effective.json, checked": Reader(
        file="run/rank00000/effective.json", seeds=trained_run, read=check, share=1
    ),
    "settings": Reader(
        file="file.yaml",
        seeds=shipped("configs", "presets", "first-divergence.yaml"),
        read=lambda directory: load_settings(directory / "file.yaml"),
    ),
    "mapping": Reader(
        file="file.yaml",
        seeds=shipped("configs", "mappings", "nn_cell_gpt.yaml"),
        read=lambda directory: load_mapping(directory / "file.yaml"),
    ),
    "policy": Reader(
        file="file.yaml",
        seeds=shipped("configs", "policies", "huawei.yaml"),
        read=lambda directory: load_policy(str(directory / "file.yaml")),
    ),
    "patches": Reader(
        file="data.yaml",
        seeds=shipped("patches", "data.yaml", name="data.yaml"),
        read=lambda directory: declare.load_file(directory / "data.yaml"),
    ),
    "layout rules": Reader(
        file="megatron.yaml",
        seeds=shipped("patches", "layouts", "megatron.yaml", name="megatron.yaml"),
        read=lambda directory: layout_rules.load_file(directory / "megatron.yaml"),
        share=2,
    ),
    "configuration": Reader(
        file="file.yaml",
        seeds=written("file.yaml", "model:\n  hidden_size: 64\n  layers: [1, 2]\nlr: 1.0e-4\n"),
        read=lambda directory: read_configuration(directory / "file.yaml"),
    ),
    "launch script": Reader(
        file="launch.sh",
        seeds=written("launch.sh", _LAUNCH),
        read=lambda directory: read_launch([str(directory / "launch.sh")], {}),
    ),
    "msprobe, dump.json": Reader(
        file="dump/step0/proc0/dump.json", seeds=kept(*_DUMP, name="dump"), read=read_dump
    ),
    "msprobe, construct.json": Reader(
        file="dump/step0/proc0/construct.json", seeds=kept(*_DUMP, name="dump"), read=read_dump, share=2
    ),
    "msprobe, tensor": Reader(file=_DUMPED, seeds=kept(*_DUMP, name="dump"), read=read_dumped_tensor),
    "msprobe, configuration": Reader(
        file="config.json",
        seeds=written("config.json", _MSPROBE),
        read=lambda directory: load_config(directory / "config.json"),
        share=2,
    ),
    "checkpoint of Megatron": Reader(
        file="checkpoint/iter_0000007/mp_rank_00/model_optim_rng.pt",
        seeds=kept("ckpt", "golden", "megatron", name="checkpoint"),
        read=read_checkpoint,
    ),
    "checkpoint, .metadata": Reader(
        file="checkpoint/.metadata",
        seeds=kept("ckpt", "golden", "torch_dist", name="checkpoint"),
        read=read_checkpoint,
    ),
    "checkpoint, .distcp": Reader(
        file="checkpoint/__0_0.distcp",
        seeds=kept("ckpt", "golden", "torch_dist", name="checkpoint"),
        read=read_checkpoint,
    ),
    "checkpoint, safetensors": Reader(
        file="checkpoint/model.safetensors", seeds=written_weights, read=read_checkpoint
    ),
    "checkpoint of MindSpore": Reader(
        file="checkpoint",
        seeds=shipped("tests", "ckpt", "golden", "mindspore_2_10.ckpt", name="checkpoint"),
        read=read_checkpoint,
    ),
    "data set, .idx": Reader(file="data.idx", seeds=written_dataset, read=read_dataset, share=2),
    "evaluation": Reader(
        file="results.json",
        seeds=written("results.json", _RESULTS),
        read=lambda directory: read_results(directory / "results.json"),
        share=2,
    ),
}
