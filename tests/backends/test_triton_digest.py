"""The Triton kernel in Triton's interpreter (no GPU has run it): the numbers of torch's operations."""

from __future__ import annotations

import importlib
import math
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mindspeed_precision.backends import torch_digest  # noqa: E402
from mindspeed_precision.backends.torch import TorchBackend  # noqa: E402
from mindspeed_precision.record.statistics import digest_host  # noqa: E402

NAME = "mindspeed_precision.backends.triton_digest"
BACKEND = TorchBackend(kernel=False)


def interpreted():
    """Return the kernel as interpreted Python: triton looks at the variable while it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton", reason="triton is not installed: nothing runs the kernel for CUDA")
        module = importlib.import_module(NAME)
    del sys.modules[NAME]
    return module


FUSED = interpreted()

pytestmark = [pytest.mark.torch, pytest.mark.matrix, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture
def fused(monkeypatch):
    """The kernel, and torch's backend that takes a CPU for a device that runs it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch_digest, "fused_kernel", lambda device: FUSED)
    return FUSED


def sample(dtype, count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64) * 40
    numbers = values.to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        special = [math.nan, math.inf, -math.inf, -0.0, 1e-41, 3e38]
        numbers[: len(special)] = torch.tensor(special, dtype=torch.float64).to(dtype)
    return numbers


def digest(tensor):
    statistics = tensor.dtype.is_floating_point
    (found,) = BACKEND.finish_digests([BACKEND.begin_digest(tensor, statistics=statistics)])
    return found


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64],
    ids=str,
)
def test_the_same_integers_and_extremes(fused, dtype, monkeypatch):
    """Of more than one program, with an end that is no word; and at an offset within a word."""
    monkeypatch.setattr(fused, "BLOCKS", 1)
    taken, original = [], fused.digest_sums

    def counted(flat, **asked):
        taken.append(flat.numel())
        return original(flat, **asked)

    monkeypatch.setattr(fused, "digest_sums", counted)
    numbers = sample(dtype, 4096 // dtype.itemsize + 7)
    for tensor in (numbers, numbers[1:]):
        found, wanted = digest(tensor), digest_host(BACKEND.to_host(tensor.clone()), statistics=True)
        assert (found.fingerprint, found.unordered) == (wanted.fingerprint, wanted.unordered)
        if found.statistics is not None:
            for name in ("minimum", "maximum", "zeros", "nans", "infs", "exponents"):
                np.testing.assert_equal(getattr(found.statistics, name), getattr(wanted.statistics, name))
            np.testing.assert_allclose(found.statistics.l2_norm, wanted.statistics.l2_norm, rtol=1e-12)
    assert taken


def test_a_kernel_that_gives_other_numbers_is_noticed(fused, monkeypatch):
    device = torch.device("cpu")
    assert torch_digest._agrees(fused, torch.bfloat16, device)
    keys = fused._keys(device)
    monkeypatch.setattr(fused, "_keys", lambda device: [keys[1], keys[0]])
    assert not torch_digest._agrees(fused, torch.bfloat16, device)
