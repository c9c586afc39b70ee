"""What is looked at again is read again: whoever wrote to it in between, and however, the record shows it."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from mindspeed_precision import load_run  # noqa: E402
from mindspeed_precision.backends.digest_kernel import DigestKernel, digest_kernel  # noqa: E402
from mindspeed_precision.backends.torch import TorchBackend  # noqa: E402
from mindspeed_precision.record.placement import canonical_index  # noqa: E402
from mindspeed_precision.record.statistics import digest_host  # noqa: E402
from mindspeed_precision.records import Part, Phase, Placement, Role, Split  # noqa: E402
from mindspeed_precision.session import Session  # noqa: E402
from mindspeed_precision.testing.recorded import UNPINNED  # noqa: E402

KERNEL, WHY = digest_kernel()
pytestmark = [pytest.mark.torch, pytest.mark.skipif(KERNEL is None, reason=WHY)]

SHAPE = (48, 130)
PLACE = 33, 71
"""Of an element that is none of the few words that are looked at first."""


LEVELS = ({"statistics": False}, {"statistics": True}, {"statistics": True, "sketch": True})


@pytest.fixture
def backend():
    return TorchBackend()


@pytest.fixture
def reads(monkeypatch):
    """What was done to take a digest: all of it, or reading it for the fingerprint and what that said."""
    done = []
    into, repeats = DigestKernel.into, DigestKernel.repeats

    def whole(kernel, address, geometry, out, **wanted):
        done.append("whole")
        into(kernel, address, geometry, out, **wanted)

    def again(kernel, address, geometry, prior):
        done.append(repeats(kernel, address, geometry, prior))
        return done[-1]

    monkeypatch.setattr(DigestKernel, "into", whole)
    monkeypatch.setattr(DigestKernel, "repeats", again)
    return done


def sample(dtype=torch.float32):
    return torch.linspace(-3, 5, SHAPE[0] * SHAPE[1]).reshape(SHAPE).to(dtype)


def by_itself(tensor, **wanted):
    fresh = TorchBackend()
    (found,) = fresh.finish_digests([fresh.begin_digest(tensor, **wanted)])
    return found


@pytest.mark.parametrize(
    "wanted", [{"statistics": False}, {"statistics": True}, {"statistics": True, "sketch": True}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_what_is_unchanged_has_the_digest_that_it_had(backend, reads, dtype, wanted):
    tensor = sample(dtype)
    views = [tensor, tensor, tensor.reshape(-1), tensor.view(2, -1, SHAPE[1])]
    digests = backend.finish_digests([backend.begin_digest(view, **wanted) for view in views])
    assert reads == ["whole", True, True, True]
    assert digests == [by_itself(tensor, **wanted)] * 4


def write_in_place(tensor):
    tensor[PLACE] += 1


def write_to_data(tensor):
    tensor.data[PLACE] += 1


def write_through_numpy(tensor):
    tensor.numpy()[PLACE] += 1


def write_one_bit(tensor):
    """As a kernel does that torch does not know: a collective, an extension."""
    address = tensor.data_ptr() + (PLACE[0] * SHAPE[1] + PLACE[1]) * tensor.itemsize
    ctypes.c_ubyte.from_address(address).value ^= 1


def swap_rows(tensor):
    tensor.data[[20, 30]] = tensor.data[[30, 20]]


WRITES = (write_in_place, write_to_data, write_through_numpy, write_one_bit, swap_rows)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "wanted", [{"statistics": False}, {"statistics": True}, {"statistics": True, "sketch": True}]
)
def test_every_write_in_between_is_seen(backend, reads, write, wanted):
    tensor = sample()
    before = backend.begin_digest(tensor, **wanted)
    version, kept = tensor._version, tensor.clone()
    write(tensor)
    assert (tensor._version == version) == (write is not write_in_place)  # the others count no version
    after = backend.begin_digest(tensor, **wanted)
    tensor.data.copy_(kept)
    restored = backend.begin_digest(tensor, **wanted)
    one, two, three = backend.finish_digests([before, after, restored])
    written = kept.clone()
    write(written)
    assert reads[:3] == ["whole", False, "whole"]
    assert (one, two, three) == tuple(by_itself(t, **wanted) for t in (kept, written, kept))
    assert one.fingerprint != two.fingerprint


def test_the_same_memory_read_in_another_way_is_another_tensor(backend, reads):
    tensor = torch.ones(64, 64)
    tensor[0, 1] = 2
    placement = Placement(shape=(64, 128), splits=(Split(dim=1, blocks=((64, 64),)),))
    part, views = Part(placement=placement, start=0, stop=4096), (tensor, tensor.T, tensor.view(torch.int32))
    handles = [backend.begin_digest(one, statistics=True) for one in (*views, tensor[:32])]
    handles.append(backend.begin_digest(tensor, statistics=False))
    handles.append(backend.begin_placed_digest(tensor, part, statistics=True))
    digests = backend.finish_digests(handles)
    assert reads == ["whole"] * 6
    host = [backend.to_host(backend.snapshot(one)) for one in (*views, tensor[:32])]
    assert digests[:4] == [digest_host(one, statistics=True) for one in host]
    assert digests[4] == digest_host(host[0], statistics=False)
    assert digests[5] == digest_host(host[0], statistics=True, index=canonical_index(part))


def test_nothing_is_kept_from_step_to_step(backend, reads):
    tensor = sample()
    for _ in range(2):
        backend.finish_digests([backend.begin_digest(tensor, statistics=True)])
    assert reads == ["whole", "whole"]


def test_a_kernel_that_takes_all_for_unchanged_is_not_used(monkeypatch):
    monkeypatch.setattr(DigestKernel, "repeats", lambda *_: True)
    assert not KERNEL.agrees()


class Child(nn.Module):
    def forward(self, values):
        return values * 2


class Parent(nn.Module):
    """Returns what its child returned, written to in between where autograd and the version do not see it."""

    def __init__(self, write):
        super().__init__()
        self.weight, self.child, self.write = nn.Parameter(sample()), Child(), write

    def forward(self, values):
        found = self.child(values * self.weight)
        if self.write is not None:
            self.write(found.detach())
        return found


@pytest.mark.parametrize("write", [None, write_to_data, write_through_numpy, write_one_bit])
def test_a_module_that_writes_to_what_its_child_returned_returns_something_else(tmp_path, write):
    model = Parent(write)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model=model, optimizer=optimizer, out=tmp_path / "run", overrides=UNPINNED) as session:
        model(torch.ones(SHAPE)).sum().backward()
        optimizer.step()
        session.step()
    outputs = {
        record.key.fqn: record.digest
        for record in load_run(tmp_path / "run").ranks[0].records
        if (record.key.phase, record.key.role) == (Phase.FPROP, Role.OUTPUT)
    }
    child, parent = outputs["child"], next(found for fqn, found in outputs.items() if fqn != "child")
    returned = sample() * 2
    assert child == by_itself(returned, statistics=True)
    if write is not None:
        write(returned)
    assert parent == by_itself(returned, statistics=True)
    assert (child.fingerprint == parent.fingerprint) == (write is None)
