"""What MindSpore keeps in one flat table: parameters, what the optimizer keeps of them, and numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.ckpt.stored import Stored
from mindspeed_precision.record.elements import to_numbers

_PREFIXES = {
    "adam_m": "exp_avg",
    "adam_v": "exp_avg_sq",
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "fp32_param": "master_param",
    "master_param": "master_param",
}
"""Of MindFormers' AdamW, of ``nn.Adam``, and of ``mint.optim``."""

_NUMBERS = re.compile(
    r"(?:global_step|learning_rate|beta[12]_power|epoch_num|step_num|loss_scale|scale_sense"
    r"|current_iterator_step|last_overflow_iterator_step|has_trained_\w+|state_step|random_op\w*)"
)
_CELLS = re.compile(r"network\.\w+")
"""What MindSpore's training cell keeps beside its network: a module of that name has parameters in torch."""
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class SortedOut:
    """A flat table, by what its entries are.

    Attributes:
        tensors: parameters.
        states: by role, what the optimizer keeps, by the parameter's name.
        numbers: counts, rates and texts.
    """

    tensors: Mapping[str, Stored]
    states: Mapping[str, Mapping[str, Stored]]
    numbers: Mapping[str, Any]


def sorted_out(table: Mapping[str, Stored], *, mindspore: bool) -> SortedOut:
    """Tell parameters from what the optimizer keeps of them (by prefix) and from numbers (by name).

    Args:
        table: by name.
        mindspore: MindSpore wrote it: what has no dimensions is a number (``append_dict``). Elsewhere it is a
            parameter or a buffer, as it is in ``torch.save``.
    """
    mindspore = mindspore or any(_state_of(name, table) for name in table)
    tensors: dict[str, Stored] = {}
    states: dict[str, dict[str, Stored]] = defaultdict(dict)
    numbers: dict[str, Any] = {}
    for name, tensor in table.items():
        role = _state_of(name, table)
        if role:
            states[role][name.partition(".")[2]] = tensor
        elif _NUMBERS.fullmatch(name) or (mindspore and _of_cell(name, tensor)):
            numbers[name] = value_of(tensor)
        else:
            tensors[name] = tensor
    return SortedOut(tensors=tensors, states=states, numbers=numbers)


def _state_of(name: str, table: Mapping[str, Stored]) -> str:
    """Return the role of what the optimizer keeps of a parameter of the table; empty for anything else."""
    prefix, _, own = name.partition(".")
    return _PREFIXES.get(prefix, "") if own in table else ""


def _of_cell(name: str, tensor: Stored) -> bool:
    return not tensor.shape or bool(_CELLS.fullmatch(name))


def value_of(tensor: Stored) -> Any:
    """Return a small tensor as a number, or as a list of numbers; of a larger one its shape."""
    if tensor.numel > _SHOWN or tensor.load is None:
        return f"{tensor.dtype} {list(tensor.shape)}"
    values = to_numbers(HostTensor(bits=tensor.host().bits, dtype=tensor.dtype)).reshape(-1)
    return values[0].item() if tensor.numel == 1 else values.tolist()


__all__ = ["SortedOut", "sorted_out", "value_of"]
