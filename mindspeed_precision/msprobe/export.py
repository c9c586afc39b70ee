"""One of our runs as a dump of msprobe: what its ``compare`` and ``graph_visualize`` read.

What msprobe records at level L0 and we do, too: modules forward and backward, parameters, sums of gradients;
the statistics of each tensor, and its elements where all were kept.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.msprobe.exported_calls import Call, ModuleNames, calls_of
from mindspeed_precision.msprobe.files import CONSTRUCT, DUMP, ELEMENTS, STACK, WRITTEN_BY
from mindspeed_precision.msprobe.reader import is_dump, load_dump
from mindspeed_precision.msprobe.torch_writer import write_torch_file
from mindspeed_precision.permissions import make_directory, write_text
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import INIT_STEP, Phase, RecordKey, Role, TensorRecord

_MINDSPORE_TYPES = {"bfloat16": "BFloat16", "bool": "Bool"}
_NO_STACK = "File none, line 0, in none, \n no call stack was recorded"


@dataclass(kw_only=True)
class Exported:
    """What was written.

    Attributes:
        directory: the dump.
        task: ``tensor`` where elements were written, else ``statistics``.
        entries: number of entries in all.
        notes: what was left out, and why.
    """

    directory: Path
    task: str
    entries: int = 0
    notes: list[str] = field(default_factory=list)


def export_run(run: Run, out: str | Path, *, like: str | Path | None = None) -> Exported:
    """Write a run as a dump of msprobe.

    Args:
        run: one of ours.
        out: a new directory, or an empty one.
        like: a dump of msprobe of the same training, whose names of classes and wrappers, and whose task, are
            taken: msprobe compares dumps of one task. Without it elements are written where all were kept.

    Raises:
        DumpError: the run is a dump of msprobe, ``out`` holds something, or cannot be written; or nothing of
            the run can be in such a dump.
    """
    if is_dump(run):
        raise DumpError("already a dump of msprobe", where=str(run.path))
    directory = Path(out)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        expected = "a new directory"
        raise DumpError("not empty, and nothing is overwritten", where=str(directory), expected=expected)
    given = None if like is None else load_dump(like)
    names = ModuleNames.of(run, given)
    elements = given is None or _has_elements(given)
    part = directory.with_name(directory.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        exported = _write(run, part, names, elements=elements)
        if directory.exists():
            directory.rmdir()
        part.rename(directory)
    except OSError as error:
        raise DumpError(f"cannot write: {error.strerror}", where=str(error.filename or part)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    exported.directory = directory
    return exported


def _has_elements(dump: Run) -> bool:
    return any(record.payload is not None for rank in dump.ranks.values() for record in rank.records)


def _write(run: Run, part: Path, names: ModuleNames, *, elements: bool) -> Exported:
    steps = {
        (step, number): calls_of(rank, step)
        for number, rank in run.ranks.items()
        for step in rank.steps
        if step != INIT_STEP
    }
    if not any(steps.values()):
        remedy = "record with capture.modules=true"
        raise DumpError("no call of a module was recorded", where=str(run.path), remedy=remedy)
    kept = elements and all(_kept(call) for calls in steps.values() for call in calls)
    exported = Exported(directory=part, task="tensor" if kept else "statistics")
    for (step, number), calls in steps.items():
        rank = run.ranks[number]
        directory = part / f"step{step}" / f"rank{number}"
        make_directory(directory.parent, exist_ok=True)
        directory.mkdir(mode=0o750)
        writer = _StepWriter(run, rank, directory, exported.task, names)
        data = {call.name(names, rank): writer.entry(call, step) for call in calls}
        data = {name: entry for name, entry in data.items() if entry}
        exported.entries += len(data)
        writer.write(data, calls)
    exported.notes = [*names.notes(), *_left_out(steps, run)]
    return exported


def _kept(call: Call) -> bool:
    return all(record.payload is not None for record in call.tensors())


class _StepWriter:
    """Writes one step of one rank."""

    def __init__(self, run: Run, rank: RankRecords, directory: Path, task: str, names: ModuleNames) -> None:
        self._mindspore = run.framework == "mindspore"
        self._rank, self._directory, self._task, self._names = rank, directory, task, names
        self._parameters = {
            (r.key.step, r.key.fqn): r
            for r in rank.records
            if r.key.role is Role.PARAM and r.key.phase in (Phase.INIT, Phase.OPTIMIZER)
        }
        self._declared = {p.fqn: p for p in rank.parameters}
        trained = {p.fqn for p in rank.parameters if p.trainable}
        self._trainable = {
            (r.digest.fingerprint, r.shape) for (_, fqn), r in self._parameters.items() if fqn in trained
        }

    def entry(self, call: Call, step: int) -> dict[str, Any]:
        """Return the entry of one call."""
        name = call.name(self._names, self._rank)
        if call.direction == "forward":
            return self._forward(call, step, name)
        if call.direction == "backward":
            return {
                "input": [self._leaf(r, f"{name}.input.{n}", False) for n, r in enumerate(call.inputs)],
                "output": [self._leaf(r, f"{name}.output.{n}", False) for n, r in enumerate(call.outputs)],
            }
        return {
            r.key.fqn.rpartition(".")[2]: [self._leaf(r, f"{name}.{r.key.fqn.rpartition('.')[2]}", False)]
            for r in call.outputs
        }

    def _forward(self, call: Call, step: int, name: str) -> dict[str, Any]:
        plain = {
            slot: self._leaf(
                r,
                f"{name}.{'input' if slot[:1].isdigit() else 'kwargs'}.{slot}",
                slot in call.graded_inputs or self._trained(r),
            )
            for slot, r in ((r.key.slot, r) for r in call.inputs)
        }
        results = {
            slot: self._leaf(r, f"{name}.output.{slot}", slot in call.graded_outputs or self._trained(r))
            for slot, r in ((r.key.slot, r) for r in call.outputs)
        }
        return {
            "input_args": _nested({s: v for s, v in plain.items() if s[:1].isdigit()}),
            "input_kwargs": {s: v for s, v in plain.items() if not s[:1].isdigit()},
            "output": _nested(results),
            "parameters": self._own_parameters(call, step, name),
        }

    def _trained(self, record: TensorRecord) -> bool:
        """Tell whether a tensor is a trainable parameter, which is given or returned as it is."""
        return (record.digest.fingerprint, record.shape) in self._trainable

    def _own_parameters(self, call: Call, step: int, name: str) -> dict[str, Any]:
        found = {}
        for fqn, declared in self._declared.items():
            owner, _, local = fqn.rpartition(".")
            if owner == call.fqn and not declared.tied_to:
                record = self._parameters.get((step - 1 if step > 0 else INIT_STEP, fqn))
                record = record or self._parameters.get((INIT_STEP, fqn)) if step == 0 else record
                if record is not None:
                    found[local] = self._leaf(record, f"{name}.parameters.{local}", declared.trainable)
        return found

    def _leaf(self, record: TensorRecord, name: str, gradient: bool) -> dict[str, Any]:
        """Return one tensor as msprobe describes it, and write its elements."""
        dtype = record.dtype
        if self._mindspore:
            words = _MINDSPORE_TYPES.get(dtype, dtype.capitalize())
            leaf: dict[str, Any] = {"type": "mindspore.Tensor", "dtype": words}
        else:
            leaf = {"type": "torch.Tensor", "dtype": f"torch.{dtype}"}
        leaf |= {"shape": list(record.shape), **_numbers(record)}
        if not self._mindspore:
            leaf["requires_grad"] = gradient
        if self._task == "tensor":
            leaf["data_name"] = self._elements(record, name)
        return leaf

    def _elements(self, record: TensorRecord, name: str) -> str:
        directory = self._directory / ELEMENTS
        directory.mkdir(mode=0o750, exist_ok=True)
        host = self._rank.payload(record)
        if self._mindspore:
            numbers = to_numbers(host)
            np.save(directory / f"{name}.npy", numbers.astype(bool) if host.dtype == "bool" else numbers)
            return f"{name}.npy"
        write_torch_file(directory / f"{name}.pt", host, record.shape)
        return f"{name}.pt"

    def write(self, data: Mapping[str, Any], calls: Iterable[Call]) -> None:
        """Write the three files."""
        elements = str((self._directory / ELEMENTS).resolve()) if self._task == "tensor" else None
        if elements is not None:
            elements = elements.replace(".part/", "/", 1)
        framework = "mindspore" if self._mindspore else "pytorch"
        head = {"task": self._task, "level": "L0", "framework": framework, "dump_data_dir": elements}
        head["written_by"] = WRITTEN_BY
        construct: dict[str, Any] = {"megatron_micro_step_number": self._microbatches(calls)}
        for call in calls:
            name = call.name(self._names, self._rank)
            if call.direction in ("forward", "backward"):
                parent = None if call.parent is None else call.parent.name(self._names, self._rank)
                construct[name] = [parent, max(call.microbatch, 0)]
        stack = {"0": [[name for name in data if ".forward." in name], [_NO_STACK]]}
        files = {DUMP: {**head, "data": data}, CONSTRUCT: construct, STACK: stack}
        for file, plain in files.items():
            path = self._directory / file
            write_text(path, json.dumps(plain, indent=1), permissions=0o640)

    def _microbatches(self, calls: Iterable[Call]) -> int:
        return max((call.microbatch for call in calls), default=0)


def _nested(leaves: Mapping[str, Any]) -> list[Any]:
    """Return a list with each leaf at its place, ``1.0`` the first of the second; gaps are null."""
    made: list[Any] = []
    for slot, leaf in leaves.items():
        first, _, rest = slot.partition(".")
        if not first.isdigit() or int(first) > 4096:
            made.append(leaf)
            continue
        made += [None] * (int(first) + 1 - len(made))
        if not rest:
            made[int(first)] = leaf
        elif rest[:1].isdigit():
            made[int(first)] = made[int(first)] if isinstance(made[int(first)], list) else []
            made[int(first)].append(leaf)
        else:
            made[int(first)] = made[int(first)] if isinstance(made[int(first)], dict) else {}
            made[int(first)][rest] = leaf
    return made


def _numbers(record: TensorRecord) -> dict[str, float | None]:
    """Return Max, Min, Mean and Norm as msprobe has them: one NaN makes all of them NaN."""
    found = record.digest.statistics
    if found is None:
        return dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    if found.nans:
        return dict.fromkeys(("Max", "Min", "Mean", "Norm"), math.nan)
    if found.infs:  # of which sign is not known
        return {"Max": math.inf, "Min": found.minimum, "Mean": math.nan, "Norm": math.inf}
    if record.dtype == "bool":
        return {"Max": bool(found.maximum), "Min": bool(found.minimum), "Mean": None, "Norm": None}
    if "float" not in record.dtype and "complex" not in record.dtype and record.shape:
        return {"Max": int(found.maximum), "Min": int(found.minimum), "Mean": None, "Norm": None}
    return {"Max": found.maximum, "Min": found.minimum, "Mean": found.mean, "Norm": found.l2_norm}


def _left_out(steps: Mapping[tuple[int, int], list[Call]], run: Run) -> list[str]:
    """Count what msprobe has no entry for."""
    written: set[tuple[int, RecordKey]] = {
        (number, record.key)
        for (_, number), calls in steps.items()
        for call in calls
        for record in call.tensors()
    }
    kinds: dict[str, int] = {}
    for number, rank in run.ranks.items():
        for record in rank.records:
            if (number, record.key) not in written and record.key.role is not Role.PARAM:
                kind = f"{record.key.phase.value}/{record.key.role.value}"
                kinds[kind] = kinds.get(kind, 0) + 1
    if not kinds:
        return []
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))
    return [f"msprobe has no entry for these records, which are left out: {listed}"]
