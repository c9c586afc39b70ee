"""The calls of modules that a run recorded, each with what it received and gave, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_precision.records import COLLECTIVES, INIT_STEP, Phase, Role, TensorRecord
from mindspeed_precision.verify.elements import Vector, numbers
from mindspeed_precision.verify.run_facts import RunFacts

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_Moment = tuple[int, int, str, int]
Slots = dict[str, TensorRecord]


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """One call of one module in one microbatch, without its recomputation.

    Attributes:
        rank: whose it is.
        fqn: the module.
        kind: name of its class, without the module that defines it; empty: not known.
        values: switches and numbers that it holds.
        step: of the training.
        microbatch: of the step.
        occurrence: nth call in the microbatch.
        inputs: what it received, by slot.
        outputs: what it gave.
        grad_outputs: gradients that came back to what it gave.
        grad_inputs: gradients of what it received, summed over everything that used it.
    """

    rank: int
    fqn: str
    kind: str
    values: Mapping[str, Any]
    step: int
    microbatch: int
    occurrence: int
    inputs: Slots = field(default_factory=dict)
    outputs: Slots = field(default_factory=dict)
    grad_outputs: Slots = field(default_factory=dict)
    grad_inputs: Slots = field(default_factory=dict)

    @property
    def moment(self) -> _Moment:
        """What tells calls of one rank apart."""
        return self.step, self.microbatch, self.fqn, self.occurrence

    def received(self, *slots: str) -> TensorRecord | None:
        """Return what came in under the first of several names that something came in under."""
        return next((self.inputs[slot] for slot in slots if slot in self.inputs), None)


_SIDES = {
    (Phase.FPROP, Role.INPUT): "inputs",
    (Phase.FPROP, Role.OUTPUT): "outputs",
    (Phase.DGRAD, Role.GRAD_OUTPUT): "grad_outputs",
    (Phase.DGRAD, Role.GRAD_INPUT): "grad_inputs",
}


def calls_of(facts: RunFacts, rank: int) -> Mapping[_Moment, ModuleCall]:
    """Return the calls of a rank in the order in which they began."""
    return facts.once(("calls", rank), lambda: _calls(facts, rank))


def _calls(facts: RunFacts, rank: int) -> Mapping[_Moment, ModuleCall]:
    held = _modules(facts, rank)
    found: dict[_Moment, ModuleCall] = {}
    for record in facts.ranks[rank].records:
        key = record.key
        side = _SIDES.get((key.phase, key.role))
        if side is None or key.recomputed or key.step < 0 or key.slot.partition(".")[0] in COLLECTIVES:
            continue
        moment = key.step, key.microbatch, key.fqn, key.occurrence
        call = found.get(moment)
        if call is None:
            kind, values = held.get(_NUMBER.sub("*", key.fqn), ("", {}))
            call = found[moment] = ModuleCall(
                rank=rank,
                fqn=key.fqn,
                kind=kind,
                values=values,
                step=key.step,
                microbatch=key.microbatch,
                occurrence=key.occurrence,
            )
        getattr(call, side).setdefault(key.slot, record)
    return found


def _modules(facts: RunFacts, rank: int) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return class and numbers of every module; of layers that are not alike, what they have in common."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for module in facts.ranks[rank].effective.get("modules", ()):
        fqn, kind = module["fqn"], str(module["class"]).rpartition(".")[2]
        known = found.get(fqn)
        if known is not None:
            same = known[0] == kind
            both = {k: v for k, v in module["values"].items() if k in known[1] and known[1][k] == v}
            found[fqn] = (kind if same else "", both if same else {})
        else:
            found[fqn] = (kind, module["values"])
    return found


def is_plain(facts: RunFacts, call: ModuleCall) -> bool:
    """Tell whether a module has no parameter but its weight and bias: no adapter beside it, say."""
    own = {f"{call.fqn}.weight", f"{call.fqn}.bias"}
    held = facts.once(("parameter names", call.rank), lambda: tuple(facts.parameters(call.rank)))
    return all(name in own for name in held if name.startswith(f"{call.fqn}."))


def parameter_before(facts: RunFacts, rank: int, fqn: str, step: int) -> TensorRecord | None:
    """Return a parameter as a step found it; None where that was not recorded whole."""
    states = facts.once(("parameter states", rank), lambda: _states(facts, rank))
    steps = facts.ranks[rank].steps
    first = min((one for one in steps if one != INIT_STEP), default=step)
    began = facts.run.manifest.get("first_step", 0)
    if step == first and step == (began or 0):
        return states.get((fqn, INIT_STEP))
    return states.get((fqn, step - 1))


def _states(facts: RunFacts, rank: int) -> dict[tuple[str, int], TensorRecord]:
    declared = facts.parameters(rank)
    late = bool(facts.config.get("ddp_config", {}).get("overlap_param_gather"))
    found = {}
    for phase in (Phase.INIT, Phase.OPTIMIZER):
        if late and phase is Phase.OPTIMIZER:
            continue  # the next forward pass gathers them
        for record in facts.of(rank, phase, Role.PARAM):
            name = record.key.fqn
            if name in declared and declared[name].shape == record.shape:
                found[name, record.key.step] = record
    return found


def elements(facts: RunFacts, rank: int, record: TensorRecord | None) -> Vector | None:
    """Return the elements of a record as float64, read once for all; None: not kept, or not finite."""
    if record is None:
        return None

    def read() -> Vector | None:
        found = record.digest.statistics
        if found is not None and (found.nans or found.infs):
            return None
        return numbers(facts, rank, record)

    return facts.once(("elements", rank, record.seq), read)
