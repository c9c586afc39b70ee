"""Files of ``torch.save`` without torch: what is there is read, nothing is run, nothing grows."""

from __future__ import annotations

import os
import pickle
import zipfile

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.errors import DumpError
from mindspeed_precision.msprobe.payloads import Stored
from mindspeed_precision.msprobe.torch_file import read_torch_file
from mindspeed_precision.msprobe.torch_writer import write_torch_file
from mindspeed_precision.record.elements import to_numbers


def archive(path, pickled, data=b"", *, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as made:
        made.writestr("x/data.pkl", pickled)
        made.writestr("x/data/0", data)
    return path


def written(path, numbers, dtype="float32"):
    bits = np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}")
    write_torch_file(path, HostTensor(bits=bits, dtype=dtype), numbers.shape)
    return path


@pytest.mark.parametrize("shape", [(2, 3), (5,), (), (0, 3), (1, 1, 4)])
def test_what_is_written_is_read(tmp_path, shape):
    numbers = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + np.float32(0.5)
    file = written(tmp_path / "x.pt", numbers)
    found = Stored(directory=tmp_path, name=file.name, dtype="float32", shape=shape).read()
    assert np.array_equal(to_numbers(found), numbers)


@pytest.mark.torch
def test_torch_reads_what_is_written_and_the_other_way_round(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = [
        torch.randn(3, 4),
        torch.randn(3, 4).bfloat16(),
        torch.randn(2).half(),
        torch.arange(6).reshape(2, 3),
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(2, 3, dtype=torch.complex128),
        torch.randn(4, 3).t(),
        torch.randn(9)[3:6],
        torch.nn.Parameter(torch.randn(3)),
    ]
    for tensor in tensors:
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        torch.save(tensor, tmp_path / "theirs.pt")
        host = Stored(directory=tmp_path, name="theirs.pt", dtype=dtype, shape=shape).read()
        write_torch_file(tmp_path / "ours.pt", host, shape)
        again = torch.load(tmp_path / "ours.pt", weights_only=True)
        assert again.dtype == tensor.dtype
        assert torch.equal(again, tensor)


@pytest.mark.torch
def test_float8(tmp_path):
    torch = pytest.importorskip("torch")
    tensor = torch.randn(2, 3).to(torch.float8_e4m3fn)
    torch.save(tensor, tmp_path / "x.pt")
    host = Stored(directory=tmp_path, name="x.pt", dtype="float8_e4m3fn", shape=(2, 3)).read()
    assert np.array_equal(to_numbers(host), tensor.float().numpy())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def test_nothing_of_a_pickle_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = archive(tmp_path / "x.pt", pickle.dumps(Evil(), protocol=2))
    with pytest.raises(DumpError, match="not one tensor"):
        read_torch_file(file)
    assert not (tmp_path / "made-by-a-pickle").exists()


def tensor_pickle(shape, stride, count, kind=b"FloatStorage", offset=0):
    def tuple_of(values):
        return b"(" + b"".join(b"\x8a\x08" + value.to_bytes(8, "little") for value in values) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    storage += b"\x8a\x08" + count.to_bytes(8, "little") + b"tQ"
    rest = b"K" + bytes([offset]) + tuple_of(shape) + tuple_of(stride) + b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR."


def test_the_helper_makes_what_is_read(tmp_path):
    file = archive(tmp_path / "x.pt", tensor_pickle((2,), (1,), 2), b"\x00" * 8)
    assert read_torch_file(file).shape == (2,)


@pytest.mark.parametrize(
    ("pickled", "data", "said"),
    [
        (tensor_pickle((10**6, 10**6), (10**6, 1), 10**12), b"\x00" * 8, "larger than its storage"),
        (tensor_pickle((10**6, 10**6), (0, 0), 2), b"\x00" * 8, "larger than its storage"),
        (tensor_pickle((4,), (1,), 2), b"\x00" * 8, "larger than its storage"),
        (tensor_pickle((2,), (1,), 2, offset=1), b"\x00" * 8, "larger than its storage"),
        (tensor_pickle((2,), (1,), 2, kind=b"ObjectStorage"), b"\x00" * 8, "unknown kind"),
        (pickle.dumps([1, 2], protocol=2), b"", "not one tensor"),
        (b"\x80\x02", b"", "damaged pickle"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, pickled, data, said):
    with pytest.raises(DumpError, match=said):
        read_torch_file(archive(tmp_path / "x.pt", pickled, data))


def test_a_compressed_archive_is_not_unpacked(tmp_path):
    data = b"\x00" * (1 << 20)
    pickled = tensor_pickle((1 << 18,), (1,), 1 << 18)
    with pytest.raises(DumpError, match="compressed or encrypted"):
        read_torch_file(archive(tmp_path / "x.pt", pickled, data, compression=zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02."])
def test_what_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(DumpError, match=r"torch\.save|the file is empty"):
        read_torch_file(tmp_path / "x.pt")
