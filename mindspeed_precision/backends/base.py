"""What capture and record need from a framework. The only place, with its siblings, that knows one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import Digest, Layout, Part


@dataclass(frozen=True, kw_only=True)
class HostTensor:
    """A tensor copied to the host.

    Attributes:
        bits: the elements in C order as unsigned integers of their width (``uint16`` for bfloat16, ``uint8``
            0 and 1 for bool), ``[...]`` of the logical shape; complex elements as two, real then imaginary,
            in a further last dimension of size 2.
        dtype: framework-neutral name of the element type.
    """

    bits: NDArray[Any]
    dtype: str

    def __post_init__(self) -> None:
        assert self.bits.dtype.kind == "u" or self.bits.dtype == np.bool_


@dataclass(frozen=True, kw_only=True, eq=False)
class Form:
    """What a tensor looks like from outside. Backends that meet the same forms again return the same object.

    Attributes:
        shape: logical shape.
        dtype: framework-neutral name of the element type.
        layout: strides as seen; None for a host number.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None


class Backend(Protocol):
    """A framework, as seen by capture and record.

    ``begin_digest`` and ``snapshot`` are called while training runs: they only enqueue work on the tensor's
    own device and stream, and never wait for it. ``finish_digests`` and ``to_host`` are called at the end of
    a step and may wait.
    """

    name: str

    def is_tensor(self, value: object) -> bool:
        """Tell whether ``value`` is a tensor of this framework."""
        ...

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """Return the logical shape."""
        ...

    def dtype(self, tensor: Any) -> str:
        """Return the framework-neutral name of the element type (``bfloat16``)."""
        ...

    def layout(self, tensor: Any) -> Layout:
        """Return strides, offset and contiguity as they are now."""
        ...

    def form(self, tensor: Any) -> Form:
        """Return shape, element type and layout, as they are now."""
        ...

    def begin_digest(self, tensor: Any, *, statistics: bool, sketch: bool = False) -> Any:
        """Enqueue the fingerprints, and statistics and sketch if asked for; return an opaque handle.

        A sketch is asked for with statistics only.
        """
        ...

    def finish_digests(self, handles: Sequence[Any]) -> list[Digest]:
        """Wait once and return the digests of all ``handles`` in order."""
        ...

    def snapshot(self, tensor: Any) -> Any:
        """Enqueue a copy in C order on the device; later writes to ``tensor`` do not change it."""
        ...

    def to_host(self, snapshot: Any) -> HostTensor:
        """Copy a snapshot to the host."""
        ...


@runtime_checkable
class PlacingBackend(Protocol):
    """A backend that can number the elements of a shard as they are numbered in the canonical tensor."""

    def begin_placed_digest(self, tensor: Any, part: Part, *, statistics: bool, sketch: bool = False) -> Any:
        """Enqueue as ``begin_digest`` does, with the canonical index of each element for its position."""
        ...
