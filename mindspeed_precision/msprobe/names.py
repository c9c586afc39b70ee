"""msprobe's names: ``Module.module.decoder.layers.0.mlp.linear_fc1.ColumnParallelLinear.forward.0``.

Of modules (of MindSpore ``Cell``): kind, chunk of the model where a list of models is dumped, path, class,
direction, number of the call. Of operations: kind (``Tensor``, ``Functional``, ``Torch``, ``Mint`` …), name,
number of the call, direction. Calls are counted within one step.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_precision.errors import DumpError

FORWARD = "forward"
BACKWARD = "backward"
PARAMETERS_GRAD = "parameters_grad"

MODULE_KINDS = ("Module", "Cell")
"""First part of the name of what was called as a module."""

WRAPPED = "module"
"""Attribute under which wrappers (DistributedDataParallel, Float16Module) hold the model."""


@dataclass(frozen=True, kw_only=True)
class EntryName:
    """A name, taken apart.

    Attributes:
        text: the name.
        kind: its first part.
        path: of a module, where it is in the model, without wrappers; of an operation, ``kind.name``.
        owner: class of a module; empty for an operation.
        direction: ``forward``, ``backward`` or ``parameters_grad``.
        call: number of the call within the step, from 0.
        chunk: number of the model chunk; None where one model was dumped.
        wrappers: how many ``module`` the path began with.
    """

    text: str
    kind: str
    path: str
    owner: str
    direction: str
    call: int
    chunk: int | None = None
    wrappers: int = 0

    @property
    def is_module(self) -> bool:
        """Whether it was called as a module."""
        return self.kind in MODULE_KINDS

    @property
    def forward(self) -> str:
        """Name of the forward call that a backward one belongs to."""
        if self.is_module:
            return f".{FORWARD}.".join(self.text.rsplit(f".{self.direction}.", 1))
        return f"{self.path}.{self.call}.{FORWARD}"

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward call."""
        return self.direction == FORWARD


def name_or_none(text: str) -> EntryName | None:
    """Take a name of ``dump.json`` apart; None: it is none of msprobe's."""
    parts = text.split(".")
    return _module(text, parts) if parts[0] in MODULE_KINDS else _operation(text, parts)


def parse_name(text: str) -> EntryName:
    """Take a name of ``dump.json`` apart.

    Raises:
        DumpError: it is none of msprobe's.
    """
    found = name_or_none(text)
    if found is None:
        expected = "like Module.NAME.CLASS.forward.0 or Tensor.matmul.0.forward"
        raise DumpError("no name of msprobe", where="dump.json", found=text[:120], expected=expected)
    return found


def _module(text: str, parts: list[str]) -> EntryName | None:
    known = (FORWARD, BACKWARD, PARAMETERS_GRAD)
    if len(parts) < 5 or parts[-2] not in known or not _number(parts[-1]):
        return None
    path = parts[1:-3]
    chunk = int(path[0]) if len(path) > 1 and _number(path[0]) else None
    path = path if chunk is None else path[1:]
    wrappers = next((n for n, part in enumerate(path) if part != WRAPPED), len(path))
    return EntryName(
        text=text,
        kind=parts[0],
        path=".".join(path[wrappers:]),
        owner=parts[-3],
        direction=parts[-2],
        call=int(parts[-1]),
        chunk=chunk,
        wrappers=wrappers,
    )


def _operation(text: str, parts: list[str]) -> EntryName | None:
    if len(parts) < 4 or parts[-1] not in (FORWARD, BACKWARD) or not _number(parts[-2]):
        return None
    return EntryName(
        text=text,
        kind=parts[0],
        path=".".join(parts[:-2]),
        owner="",
        direction=parts[-1],
        call=int(parts[-2]),
    )


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
