"""Which gradients of a dump may be a part of those that our runs record.

msprobe puts an identity into the graph before and behind each module: what it records of a module's input is
the gradient that flows through that module. Our runs record the gradient of the tensor, the sum over all that
read it. The two are one number where the module is the only reader, which a dump shows where it also has the
gradient of the same tensor as the output of the module that made it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mindspeed_precision.msprobe.entries import Seen
from mindspeed_precision.records import Phase, RecordKey, Role

PART = "may be the part of a gradient that flows through this module"
"""Note of such a record."""

_Call = tuple[int, str, int, bool]
_Likeness = tuple[object, ...]


def uncertain_parts(seen: Sequence[Seen]) -> dict[int, str]:
    """Return ``PART`` by the position of each gradient of a module of which it is not known to be the whole.

    Args:
        seen: the tensors of one step, in the order of execution.
    """
    tensors = _Tensors()
    modules = [(number, one) for number, one in enumerate(seen) if one.of_module]
    for _, one in modules:
        tensors.add(one)
    return {
        number: PART for number, one in modules if one.key.phase is Phase.DGRAD and not tensors.whole(one)
    }


class _Tensors:
    """The tensors between modules: which module made each, and the gradient that came back to it there."""

    def __init__(self) -> None:
        self._slots: dict[tuple[_Call, Role, str], _Likeness] = {}
        self._makers: dict[tuple[int, _Likeness], tuple[_Call, str]] = {}
        self._inputs: dict[_Call, set[_Likeness]] = defaultdict(set)
        self._gradients: dict[tuple[_Call, str], _Likeness] = {}

    def add(self, one: Seen) -> None:
        key, like = one.key, one.tensor.likeness
        call = _call(key)
        if key.phase is Phase.FPROP:
            self._slots[call, key.role, key.slot] = like
            if key.role is Role.INPUT:
                self._inputs[call].add(like)
            elif like not in self._inputs[call]:  # else it is returned as it came
                self._makers.setdefault((key.microbatch, like), (call, key.slot))
        elif key.role is Role.GRAD_OUTPUT:
            self._gradients.setdefault((call, key.slot), like)

    def whole(self, one: Seen) -> bool:
        """Tell whether a gradient is known to be that of the tensor, not a part of it."""
        key = one.key
        role = Role.INPUT if key.role is Role.GRAD_INPUT else Role.OUTPUT
        tensor = self._slots.get((_call(key), role, key.slot))
        if role is Role.OUTPUT and tensor not in self._inputs[_call(key)]:
            return True
        maker = self._makers.get((key.microbatch, tensor)) if tensor is not None else None
        return maker is not None and self._gradients.get(maker) == one.tensor.likeness


def _call(key: RecordKey) -> _Call:
    return key.microbatch, key.fqn, key.occurrence, key.recomputed
