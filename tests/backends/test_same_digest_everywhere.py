"""One tensor, one fingerprint: numpy's definition, torch, MindSpore, and MindSpore behind torch's API."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tensor_cases import tensor_cases  # noqa: E402
from tensor_making import read_cases, reading, torch_tensor  # noqa: E402

from mindspeed_precision.backends import load_backend  # noqa: E402
from mindspeed_precision.backends.base import HostTensor  # noqa: E402
from mindspeed_precision.record.statistics import digest_host  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
CASES = {case.name: case for case in tensor_cases()}
EXACT = ("dtype", "shape", "fingerprint", "unordered", "counts")


@pytest.fixture(scope="module")
def in_torch():
    return read_cases("torch")


def read_by(python, framework, out):
    """Let the interpreter ``python`` read every case; it writes what it read."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, Path(__file__).with_name("tensor_making.py"), framework, out],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert out.exists(), done.stderr
    return json.loads(out.read_text())


def same_moments(one, two):
    """Tell whether extremes agree exactly, and sums as far as their order of summation leaves open."""
    if any(one[name] != two[name] for name in ("minimum", "maximum")):
        return False
    sums = [(one[name], two[name]) for name in ("mean", "l2_norm")]
    return all(a == b or (None not in (a, b) and math.isclose(a, b, rel_tol=1e-12)) for a, b in sums)


def differences(one, two):
    """Return the names of tensors that differ in what must not."""
    assert one.keys() == two.keys() == CASES.keys()
    return {
        name: [field for field in EXACT if one[name][field] != two[name][field]]
        + ([] if same_moments(one[name]["moments"], two[name]["moments"]) else ["moments"])
        + (["layout"] if CASES[name].logical().size and one[name]["layout"] != two[name]["layout"] else [])
        for name in one
    }


def differing(one, two):
    return {name: fields for name, fields in differences(one, two).items() if fields}


def test_torch_agrees_with_the_definition(in_torch):
    assert len(CASES) >= 200
    for name, case in CASES.items():
        wanted = digest_host(HostTensor(bits=case.logical(), dtype=case.dtype), statistics=True)
        found = in_torch[name]
        assert (found["fingerprint"], found["unordered"]) == (wanted.fingerprint, wanted.unordered), name


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("environment", "framework"),
    [
        ("mindspore_python", "mindspore"),
        ("mindspore_python", "mindtorch"),
        ("mindspore_native_python", "mindspore"),
    ],
)
def test_mindspore_agrees_with_torch(environment, framework, in_torch, tmp_path, request):
    """Torch agrees with the definition (above), so all three agree. Strides of empty tensors may differ."""
    python = request.getfixturevalue(environment)
    found = read_by(python, framework, tmp_path / "read.json")
    assert len(found) >= 200
    assert differing(in_torch, found) == {}


def test_one_wrong_bit_or_stride_is_seen(in_torch):
    """The comparison above can fail."""
    backend, case = load_backend("torch"), CASES["bfloat16-transposed"]
    tensor = torch_tensor(case)
    other = dict(in_torch)
    other[case.name] = reading(backend, tensor.contiguous())
    assert differing(in_torch, other) == {case.name: ["layout"]}
    flipped = tensor.contiguous().view(torch.int16).bitwise_xor(torch.tensor(np.eye(6, 7, dtype=np.int16)))
    other[case.name] = reading(backend, flipped.view(torch.bfloat16))
    assert set(differing(in_torch, other)[case.name]) >= {"fingerprint", "unordered", "layout"}
