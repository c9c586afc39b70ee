"""A digest is taken once where several records are of the same memory, and again where it was written."""

from __future__ import annotations

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mindspeed_precision.backends.digest_kernel import digest_kernel  # noqa: E402
from mindspeed_precision.backends.torch import SMALLEST_REUSED, TorchBackend  # noqa: E402
from mindspeed_precision.config import load_settings  # noqa: E402
from mindspeed_precision.dump.reader import load_run  # noqa: E402
from mindspeed_precision.dump.writer import RankWriter, create_run  # noqa: E402
from mindspeed_precision.record.recorder import Recorder  # noqa: E402
from mindspeed_precision.records import Observation, Phase, RankCoordinates, RecordKey, Role  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(digest_kernel()[0] is None, reason=digest_kernel()[1]),
]

SHAPE = (64, 2 * SMALLEST_REUSED // 64)
WRITES = {
    "in place": lambda t: t.add_(1),
    "one element": lambda t: t[3, 4].fill_(7),
    "through a view": lambda t: t.view(-1)[5:6].zero_(),
    "through .data": lambda t: t.data.mul_(2),
    "through numpy": lambda t: t.numpy().fill(3),
}


@pytest.fixture
def backend():
    backend = TorchBackend()
    yield backend
    backend.forget()


def test_the_same_memory_has_one_identity(backend):
    tensor = torch.randn(SHAPE, requires_grad=True)
    first = backend.identity(tensor)
    assert first is not None
    assert backend.identity(tensor.detach()) == first
    assert backend.identity(tensor.view(-1)) == first
    assert backend.identity(tensor.clone()) != first
    assert backend.identity(tensor.detach()[:32]) != first
    assert backend.identity(tensor.detach().view(torch.int32)) != first


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_was_written_has_another(backend, write):
    tensor = torch.randn(SHAPE)
    before = backend.identity(tensor)
    write(tensor)
    assert backend.identity(tensor) != before


def test_new_memory_at_the_old_address_has_another(backend):
    memory = np.zeros(SHAPE, np.float32)
    identities, addresses = set(), set()
    for _ in range(20):
        tensor = torch.from_numpy(memory)
        identities.add(backend.identity(tensor))
        addresses.add(tensor.data_ptr())
        del tensor
    assert len(addresses) == 1
    assert len(identities) == 20


def test_nothing_is_kept_alive(backend):
    tensor = torch.zeros(SHAPE)
    memory = tensor.untyped_storage()._weak_ref()
    backend.identity(tensor)
    del tensor
    gc.collect()
    assert torch.UntypedStorage._expired(memory)
    torch.UntypedStorage._free_weak_ref(memory)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4), torch.zeros(SHAPE).t(), torch.zeros(SHAPE, device="meta")],
    ids=["small", "turned", "meta"],
)
def test_where_it_is_not_known(backend, tensor):
    assert backend.identity(tensor) is None


class Counting(TorchBackend):
    """Counts digests."""

    taken = 0

    def begin_digest(self, tensor, **wanted):
        self.taken += 1
        return super().begin_digest(tensor, **wanted)


@pytest.mark.parametrize(
    ("phase", "write", "taken"),
    [
        (Phase.FPROP, None, 1),
        (Phase.DGRAD, None, 1),
        (Phase.FPROP, WRITES["one element"], 2),
        (Phase.FPROP, WRITES["through .data"], 2),
        (Phase.ACCUMULATE, None, 2),
        (Phase.OPTIMIZER, None, 2),
    ],
)
def test_records_of_one_memory(tmp_path, phase, write, taken):
    backend, run = Counting(), tmp_path / "run"
    create_run(run, {"parallel": {"world_size": 1}})
    writer = RankWriter(run, coordinates=RankCoordinates())
    recorder = Recorder(backend=backend, writer=writer, settings=load_settings(out=run))
    tensors = [torch.randn(SHAPE), torch.randn(SHAPE)]
    for step, tensor in enumerate(tensors):
        recorder.begin_step(step)
        for fqn in ("a", "b"):
            key = RecordKey(step=step, phase=phase, fqn=fqn, role=Role.OUTPUT)
            recorder.observe(Observation(key=key, tensor=tensor))
            if write is not None and fqn == "a":
                write(tensor)
        recorder.end_step()
    recorder.close(complete=True)
    assert backend.taken == 2 * taken
    records = load_run(run).ranks[0].records
    equal = [one.digest == two.digest for one, two in zip(records[::2], records[1::2], strict=True)]
    assert equal == [write is None, write is None]
    assert records[1].digest == backend.finish_digests([backend.begin_digest(tensors[0], statistics=True)])[0]
