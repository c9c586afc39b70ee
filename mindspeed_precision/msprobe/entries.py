"""Entries of one step of one rank, as what they are in our words: phase, name, role, slot of each tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_precision.msprobe.calls import Construct, Moment, events, moments, parsed
from mindspeed_precision.msprobe.names import BACKWARD, MODULE_KINDS, PARAMETERS_GRAD, EntryName
from mindspeed_precision.msprobe.numbering import layers_before
from mindspeed_precision.msprobe.operations import computes_wgrad, first_unread
from mindspeed_precision.msprobe.tensors import DumpedTensor, tensors_of
from mindspeed_precision.records import NO_MICROBATCH, Phase, RecordKey, Role

PYTORCH = "pytorch"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A tensor with its place in the training.

    Attributes:
        key: of the record that it becomes; its step is that of the dump.
        tensor: as the entry describes it.
        entry: name of the entry.
        transposed: the record is its transpose.
    """

    key: RecordKey
    tensor: DumpedTensor
    entry: str
    transposed: bool = False

    @property
    def of_module(self) -> bool:
        """Whether it is of a call of a module."""
        return self.entry.startswith(tuple(f"{kind}." for kind in MODULE_KINDS))

    @property
    def at_gemm(self) -> bool:
        """Whether it is of the product that gives dW."""
        return self.key.phase is Phase.WGRAD


@dataclass(kw_only=True)
class StepEntries:
    """One step of one rank.

    Attributes:
        step: msprobe's.
        framework: ``pytorch``, ``mindspore`` or ``mindtorch``.
        data: entries by name.
        construct: what ran inside what.
        exported: written from a run of ours: moments are exact to float64.
        skipped: entries and tensors that become no record, by reason.
        examples: for each reason, the first entry.
    """

    step: int
    framework: str
    data: Mapping[str, Any]
    construct: Construct
    exported: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names, odd = parsed(self.data)
        for name in odd:
            self.skip("entries have a name that is none of msprobe's", name)
        modules = [name for name in self.names.values() if name.is_module]
        self._depth = max((name.wrappers for name in modules if not name.path), default=0)
        self._layers = layers_before(modules)
        self.moments: Mapping[str, Moment] = moments(self.names, self.construct, self.fqn)
        self._lists: dict[tuple[str, str], list[DumpedTensor]] = {}
        self.parameters = self._parameters()

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the step."""
        found = [m.microbatch for name, m in self.moments.items() if self.names[name].is_module]
        return max(found, default=NO_MICROBATCH) + 1

    def skip(self, reason: str, name: str, count: int = 1) -> None:
        """Count what becomes no record."""
        self.skipped[reason] += count
        self.examples.setdefault(reason, name)

    def fqn(self, name: EntryName) -> str:
        """Return the canonical name of a module; layers of later chunks are numbered on from earlier ones."""
        before = self._layers.get(name.chunk or 0, {})
        parts = name.path.split(".")
        for at, part in enumerate(parts[:-1]):
            if part == "layers" and parts[at + 1].isdigit():
                parts[at + 1] = str(int(parts[at + 1]) + before.get(".".join(parts[: at + 1]), 0))
                break
        return ".".join(parts)

    def tensors(self, entry: str, part: str) -> list[DumpedTensor]:
        """Return the tensors of a list of an entry; none where it is absent or not as msprobe writes it."""
        if (entry, part) not in self._lists:
            value = self.data[entry].get(part) if isinstance(self.data.get(entry), dict) else None
            if isinstance(value, list) and len(value) == 1 and part == "output" and not _described(value[0]):
                value = value[0]  # a list or a mapping that a module returned
            try:
                found = list(tensors_of(value, self.framework))
                if self.exported:
                    found = [replace(one, summary=replace(one.summary, roundoff=0.0)) for one in found]
            except (ValueError, RecursionError) as error:
                self.skip(f"arguments are not described as msprobe does it ({error})", entry)
                found = []
            self._lists[entry, part] = found
        return self._lists[entry, part]

    def _parameters(self) -> dict[str, DumpedTensor]:
        """Return the parameters by canonical name, as the first forward call of the step found them."""
        found: dict[str, DumpedTensor] = {}
        for text, name in self.names.items():
            if name.is_module and name.is_forward and not self._wraps(name):
                fqn = self.fqn(name)
                for tensor in self.tensors(text, "parameters"):
                    found.setdefault(f"{fqn}.{tensor.slot}" if fqn else tensor.slot, tensor)
        return found

    def _wraps(self, name: EntryName) -> bool:
        """Tell whether a module is a wrapper around the model, which our runs do not record."""
        return name.is_module and not name.path and name.wrappers < self._depth

    def modules(self) -> dict[str, str]:
        """Return by canonical name of a module the name of its first forward call."""
        found: dict[str, str] = {}
        for text, name in self.names.items():
            if name.is_module and name.is_forward and not self._wraps(name):
                found.setdefault(self.fqn(name), text)
        return found

    def records(self) -> Iterator[Seen]:
        """Yield the tensors of the step in the order of execution, without the parameters before it."""
        for event in events(self.names, self.construct):
            name = self.names[event.name]
            if not isinstance(self.data[event.name], dict):
                if event.ended:
                    self.skip("entries are no objects", event.name)
            elif self._wraps(name):
                if event.ended:
                    self.skip("entries are of a wrapper around the model", event.name)
            elif name.is_module:
                yield from self._of_module(name, ended=event.ended)
            elif event.ended or not self.construct.outside(event.name):
                yield from self._of_operation(name, ended=event.ended)

    def _of_module(self, name: EntryName, *, ended: bool) -> Iterator[Seen]:
        if name.direction == PARAMETERS_GRAD:
            yield from self._gradients(name) if ended else ()
        elif name.direction == BACKWARD:
            yield from self._flow_back(name, ended=ended)
        else:
            parts = ("output",) if ended else ("input_args", "input_kwargs")
            role = Role.OUTPUT if ended else Role.INPUT
            for tensor in (tensor for part in parts for tensor in self.tensors(name.text, part)):
                yield self._seen(name, Phase.FPROP, role, tensor.slot, tensor)

    def _flow_back(self, name: EntryName, *, ended: bool) -> Iterator[Seen]:
        """Yield the gradients of outputs, or at the end of inputs, under the slots of what they belong to.

        msprobe numbers them over the tensors that want a gradient, of the arguments without keywords.
        """
        found = self.tensors(name.text, "output" if ended else "input")
        given = self.tensors(name.forward, "input_args" if ended else "output")
        wanted = [tensor for tensor in given if tensor.requires_grad is not False]
        for tensor in found:
            at = tensor.slot.split(".")[0]
            of = wanted[int(at)] if at.isdigit() and int(at) < len(wanted) else None
            if of is not None and of.shape != tensor.shape:
                of = None
            parameter = self._returned(name, of) if of is not None and not ended else ""
            if parameter:
                role = Role.BGRAD if parameter.endswith(".bias") else Role.WGRAD
                yield self._about(parameter, Phase.WGRAD, role, tensor, name)
                continue
            role = Role.GRAD_INPUT if ended else Role.GRAD_OUTPUT
            yield self._seen(name, Phase.DGRAD, role, tensor.slot if of is None else of.slot, tensor)

    def _returned(self, name: EntryName, output: DumpedTensor) -> str:
        """Return the parameter that a module returns as an output (a bias, to be added later), or nothing."""
        fqn = self.fqn(name)
        below = [
            full
            for full, tensor in self.parameters.items()
            if (full.startswith(f"{fqn}.") or not fqn) and tensor.likeness == output.likeness
        ]
        own = [full for full in below if "." not in full[len(fqn) + 1 :]]
        return (own or below)[0] if len(own or below) == 1 else ""

    def _gradients(self, name: EntryName) -> Iterator[Seen]:
        """Yield the gradients of a module's parameters, or say which are null."""
        fqn, values = self.fqn(name), self.data[name.text]
        for local, value in values.items():
            full = f"{fqn}.{local}" if fqn else local
            found = self.tensors(name.text, local)
            if not found:
                what = "null" if value in (None, [None]) else "not described as msprobe does it"
                self.skip(f"gradients of parameters are {what}", f"{full} in {name.text}")
            for tensor in found[:1]:
                if self.framework == PYTORCH:  # what is in main_grad, or in grad, by then
                    yield self._about(full, Phase.ACCUMULATE, Role.MAIN_GRAD, tensor, name, slot="after")
                else:
                    role = Role.BGRAD if local == "bias" else Role.WGRAD
                    yield self._about(full, Phase.WGRAD, role, tensor, name)

    def _about(
        self, parameter: str, phase: Phase, role: Role, tensor: DumpedTensor, name: EntryName, slot: str = ""
    ) -> Seen:
        moment = self.moments.get(name.text)
        of_call = name.direction == BACKWARD and moment is not None
        microbatch = moment.microbatch if of_call and moment is not None else name.call
        key = RecordKey(
            step=self.step, microbatch=microbatch, phase=phase, fqn=parameter, role=role, slot=slot
        )
        return Seen(key=key, tensor=tensor, entry=name.text)

    def _of_operation(self, name: EntryName, *, ended: bool) -> Iterator[Seen]:
        if self.construct.outside(name.text):
            self.skip("operations are of clipping or the optimizer, without a parameter's name", name.text)
            return
        forward = name.text if name.is_forward else name.forward
        around = self.names.get(self.construct.parents.get(forward) or "")
        product = self._weight_product(name, around)
        if product and around is not None:
            yield from self._product(name, product, around, ended=ended)
            return
        inside = around is not None and around.direction == BACKWARD
        back = inside or not name.is_forward
        began = ("input_args", "input_kwargs") if name.is_forward else ("input",)
        owner = "" if around is None else self.fqn(around)
        fqn = ".".join(part for part in (owner, BACKWARD if inside else "", name.path) if part)
        phase = Phase.DGRAD if back else Phase.FPROP
        roles = (Role.GRAD_OUTPUT, Role.GRAD_INPUT) if back else (Role.INPUT, Role.OUTPUT)
        unread = not ended and first_unread(name, self.data[name.text])
        for part in ("output",) if ended else began:
            for tensor in self.tensors(name.text, part):
                if unread and part == "input_args" and tensor.slot == "0":
                    self.skip("inputs that an operation with beta=0 does not read", name.text)
                    continue
                yield self._seen(name, phase, roles[ended], tensor.slot, tensor, fqn=fqn)

    def _weight_product(self, name: EntryName, around: EntryName | None) -> str:
        """Return the linear whose dW an operation in its backward computes, or nothing."""
        if around is None or around.direction != BACKWARD or not name.is_forward:
            return ""
        fqn = self.fqn(around)
        given = self.tensors(around.forward, "input_kwargs")
        weight = self.parameters.get(f"{fqn}.weight") or next((w for w in given if w.slot == "weight"), None)
        operands, made = self.tensors(name.text, "input_args"), self.tensors(name.text, "output")
        return fqn if computes_wgrad(name, operands, made, weight) else ""

    def _product(self, name: EntryName, fqn: str, around: EntryName, *, ended: bool) -> Iterator[Seen]:
        """Yield dW at its GEMM, or before it the operands, ``grad_output`` as ``[tokens, out]``."""
        roles = (Role.WGRAD,) if ended else (Role.GRAD_OUTPUT, Role.INPUT)
        tensors = self.tensors(name.text, "output" if ended else "input_args")
        for role, tensor in zip(roles, tensors, strict=True):
            seen = self._seen(around, Phase.WGRAD, role, "", tensor, fqn=fqn)
            yield Seen(key=seen.key, tensor=tensor, entry=name.text, transposed=role is Role.GRAD_OUTPUT)

    def _seen(
        self,
        name: EntryName,
        phase: Phase,
        role: Role,
        slot: str,
        tensor: DumpedTensor,
        *,
        fqn: str | None = None,
    ) -> Seen:
        moment = self.moments[name.text]
        key = RecordKey(
            step=self.step,
            microbatch=moment.microbatch,
            phase=phase,
            fqn=self.fqn(name) if fqn is None else fqn,
            role=role,
            slot=slot,
            occurrence=moment.occurrence,
            recomputed=moment.recomputed and phase is Phase.FPROP,
        )
        return Seen(key=key, tensor=tensor, entry=name.text)


def _described(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and isinstance(value.get("type"), str))
