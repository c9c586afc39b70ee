"""Elements that msprobe kept (task ``tensor``): ``.pt`` of torch, ``.npy`` of MindSpore."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.errors import DumpError
from mindspeed_precision.msprobe.torch_file import read_torch_file
from mindspeed_precision.record.elements import width_of


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The file of one tensor, as its entry names it.

    Attributes:
        directory: ``dump_tensor_data`` of the rank.
        name: ``data_name`` of the entry.
        dtype: of the entry, framework-neutral.
        shape: of the entry.
        transposed: the record is the transpose of the two-dimensional tensor in the file.
    """

    directory: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    transposed: bool = False

    def read(self) -> HostTensor:
        """Return the elements.

        Raises:
            DumpError: the name leaves the directory, the file is absent or a link, or does not fit its entry.
        """
        path = self.directory / self.name
        if Path(self.name).name != self.name or "\\" in self.name or self.name in (".", ".."):
            where, found = str(self.directory), repr(self.name[:120])
            raise DumpError("data_name is no file of this directory", where=where, found=found)
        if path.is_symlink() or self.directory.is_symlink() or not path.is_file():
            raise DumpError("no such file of elements", where=str(path), expected="a file, no link")
        if path.suffix not in (".pt", ".npy"):
            raise DumpError("elements of an unknown kind", where=str(path), expected=".pt or .npy")
        bits = read_torch_file(path) if path.suffix == ".pt" else _read_npy(path, self.dtype)
        bits = self._fitting(bits, path)
        if self.transposed:
            bits = np.ascontiguousarray(bits.T)
        return HostTensor(bits=bits, dtype=self.dtype)

    def _fitting(self, bits: NDArray[Any], path: Path) -> NDArray[Any]:
        complex_parts = (2,) if self.dtype.startswith("complex") else ()
        if self.dtype == "complex64" and bits.dtype.itemsize == 8:
            bits = bits.view("<u4").reshape(*bits.shape, 2)
        width = width_of(self.dtype) // (2 if complex_parts else 1)
        if bits.shape != (*self.shape, *complex_parts) or bits.dtype.itemsize != width:
            raise DumpError(
                "the file of elements does not fit its entry",
                where=str(path),
                found=f"{list(bits.shape)} of {8 * bits.dtype.itemsize} bits",
                expected=f"{list(self.shape)} of {self.dtype}",
            )
        return bits


def _read_npy(path: Path, dtype: str) -> NDArray[Any]:
    """Read an array of numpy's; mapped, so that a header which claims too much takes no memory."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        text = " ".join(str(error).split())[:120]
        raise DumpError(f"not readable as an array: {text}", where=str(path)) from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biufc":
        raise DumpError("not an array of numbers", where=str(path), found=str(getattr(found, "dtype", "")))
    array = np.ascontiguousarray(found).reshape(found.shape)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if dtype == "bfloat16" and little.dtype == np.dtype("<f4"):
        return _narrowed(little, path)
    parts = (2,) if little.dtype.kind == "c" else ()
    width = little.dtype.itemsize // (2 if parts else 1)
    bits: NDArray[Any] = little.reshape(-1).view(f"<u{width}").reshape(*found.shape, *parts)
    return bits


def _narrowed(wide: NDArray[Any], path: Path) -> NDArray[Any]:
    """Return bfloat16 that MindSpore's dump widened to float32: the lower halves are zero, or it was none."""
    bits = wide.reshape(-1).view("<u4")
    if bits.size and bool((bits & np.uint32(0xFFFF)).any()):
        raise DumpError("elements that are no bfloat16", where=str(path), expected="float32 that widens it")
    upper: NDArray[Any] = (bits >> np.uint32(16)).astype("<u2").reshape(wide.shape)
    return upper
