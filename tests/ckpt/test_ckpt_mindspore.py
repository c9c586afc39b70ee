"""Checkpoints that MindSpore wrote: small ones that are kept here, and those of the installed one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision.ckpt import open_checkpoint
from mindspeed_precision.errors import CheckpointError

HERE = Path(__file__).parent
GOLDEN, CHECKED = (HERE / "golden" / name for name in ("mindspore_2_10.ckpt", "mindspore_2_10_checked.ckpt"))
WEIGHT = "model.layers.0.attention.wo.weight"


def expect(found):
    weight = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
    assert found.family == "mindspore"
    assert {name: (one.shape, one.dtype) for name, one in found.tensors.items()} == {
        WEIGHT: ((3, 4), "float32"),
        "model.norm_out.weight": ((3,), "bfloat16"),
        "half": ((2,), "float16"),
        "count": ((3,), "int32"),
    }
    assert np.array_equal(found.tensors[WEIGHT].bits().view("<f4"), weight)
    assert found.tensors["model.norm_out.weight"].bits().tolist() == [0x3F80, 0xC000, 0x4040]
    assert np.array_equal(found.states["exp_avg"][WEIGHT].bits().view("<f4"), weight * np.float32(0.5))
    assert np.array_equal(found.states["exp_avg_sq"][WEIGHT].bits().view("<f4"), weight * weight)
    assert found.rest["global_step"] == 7


def test_plain():
    found = open_checkpoint(GOLDEN)
    expect(found)
    assert {name: found.rest[name] for name in ("epoch_num", "learning", "text")} == {
        "epoch_num": 3,
        "learning": 0.5,
        "text": "abc",
    }


def test_with_a_checksum():
    found = open_checkpoint(CHECKED)
    expect(found)
    assert found.notes == ("its checksum was checked",)


def test_a_checksum_that_is_another(tmp_path):
    data = bytearray(CHECKED.read_bytes())
    data[60] ^= 1
    (tmp_path / "bad.ckpt").write_bytes(data)
    with pytest.raises(CheckpointError, match="its checksum is another"):
        open_checkpoint(tmp_path / "bad.ckpt")


def test_a_parameter_in_slices(tmp_path):
    """As MindSpore writes parameters above half a gigabyte: several values of one tag, each with all dims."""
    from mindspeed_precision.backends.base import HostTensor

    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    def value(tag, dims, content):
        tensor = b"".join(bytes([8, size]) for size in dims) + field(2, b"Float32") + field(3, content)
        return field(1, field(1, tag) + field(2, tensor))

    whole = np.arange(8, dtype="<f4")
    slices = [value(b"w", (4, 2), part.tobytes()) for part in np.split(whole, 2)]
    (tmp_path / "big.ckpt").write_bytes(b"".join(slices) + value(b"x", (1,), whole[:1].tobytes()))
    found = open_checkpoint(tmp_path / "big.ckpt").tensors
    assert np.array_equal(found["w"].bits().view("<f4"), whole.reshape(4, 2))
    assert isinstance(found["x"].host(), HostTensor)


@pytest.mark.mindspore
def test_what_the_installed_mindspore_writes(tmp_path):
    pytest.importorskip("mindspore")
    sys.path.insert(0, str(HERE / "scripts"))
    try:
        from write_mindspore import write
    finally:
        sys.path.pop(0)
    write(tmp_path)
    expect(open_checkpoint(tmp_path / "plain.ckpt"))
    expect(open_checkpoint(tmp_path / "checked.ckpt"))
    expect(open_checkpoint(tmp_path / "plain.safetensors"))
