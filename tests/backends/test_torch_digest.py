"""The torch backend in torch's own operations: the definition's numbers, nothing disturbed or waited for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mindspeed_precision.backends import (  # noqa: E402
    load_backend,
    torch_digest,
    torch_fingerprint,
    torch_tables,
)
from mindspeed_precision.backends.torch import TorchBackend  # noqa: E402
from mindspeed_precision.errors import PrecisionError  # noqa: E402
from mindspeed_precision.record.sketch import ROUNDOFF, SINGLE_ROUNDOFF, unpack  # noqa: E402
from mindspeed_precision.record.statistics import digest_host  # noqa: E402

pytestmark = pytest.mark.torch

BACKEND = TorchBackend(kernel=False)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def digest(tensor, *, statistics=True):
    (found,) = BACKEND.finish_digests([BACKEND.begin_digest(tensor, statistics=statistics)])
    return found


def expected(tensor, *, statistics=True):
    return digest_host(BACKEND.to_host(BACKEND.snapshot(tensor)), statistics=statistics)


def sample(dtype, *shape):
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 40
    if dtype.is_complex:
        return torch.complex(values, values.flip(0)).to(dtype)
    if not dtype.is_signed:
        values = values.abs()
    result = values.to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        special = [math.nan, math.inf, -math.inf, -0.0, 1e-41, 3e38]
        flat = result.view(-1)
        flat[: len(special)] = torch.tensor(special[: len(flat)], dtype=torch.float64).to(dtype)
    return result


def assert_same(found, wanted):
    assert (found.fingerprint, found.unordered) == (wanted.fingerprint, wanted.unordered)
    ours, theirs = found.statistics, wanted.statistics
    for name in ("zeros", "nans", "infs", "exponents"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("minimum", "maximum"):
        np.testing.assert_equal(getattr(ours, name), getattr(theirs, name))
    for name in ("mean", "l2_norm"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_stride_agrees_with_the_definition(dtype):
    tensor = sample(dtype, 6, 5, 4)
    views = [
        tensor,
        tensor.permute(2, 0, 1),
        tensor[1::2, 1:, ::3],
        tensor[:1].expand(3, 5, 4),
        tensor[0, 0, 0],
    ]
    views += [tensor[:0], tensor[:, None].transpose(0, 3)]
    for view in views:
        assert_same(digest(view), expected(view))
        assert digest(view).fingerprint == digest(view.clone().contiguous()).fingerprint


@pytest.fixture
def few_rows(monkeypatch):
    """Let tables keep few rows, and forget those that they have."""

    def keep(limit):
        monkeypatch.setattr(torch_tables, "TABLE_LIMIT", limit)
        for name in ("BLOCKS", "SIGNS"):
            table = getattr(torch_tables, name)
            fresh = torch_tables.Table(table._compute, least=limit)
            monkeypatch.setattr(torch_tables, name, fresh)

    return keep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int32], ids=str)
def test_pieces_and_missing_keys_change_nothing(dtype, monkeypatch, few_rows):
    """More elements than a pass takes and than the tables hold."""
    tensor = sample(dtype, 7, 3, 50)
    wanted, turned = digest(tensor), digest(tensor.permute(2, 1, 0))
    for limit in (1, 64):
        monkeypatch.setattr(torch_digest, "CPU_PIECE", 32)
        few_rows(limit)
        assert_same(digest(tensor), wanted)
        assert_same(digest(tensor.permute(2, 1, 0)), turned)
        assert_same(digest(tensor[:, :1].expand(7, 9, 50)), expected(tensor[:, :1].expand(7, 9, 50)))


def sketch_of(tensor):
    (found,) = BACKEND.finish_digests([BACKEND.begin_digest(tensor, statistics=True, sketch=True)])
    return found.sketch


def assert_same_sketch(found, tensor, roundoff=ROUNDOFF):
    wanted = digest_host(BACKEND.to_host(BACKEND.snapshot(tensor)), statistics=True, sketch=True).sketch
    assert (found is None) == (wanted is None)
    if wanted is not None:
        assert found.roundoff == roundoff
        gap = np.linalg.norm(unpack(found) - unpack(wanted))
        assert gap <= roundoff * np.linalg.norm(unpack(wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sketch_agrees_with_the_definition(dtype):
    tensor = sample(dtype, 9, 8, 7)
    for view in (tensor, tensor.permute(2, 0, 1), tensor[1::2, 1:, ::3], tensor[:1].expand(30, 8, 7)):
        found = sketch_of(view)
        assert (found is not None) == (dtype.is_floating_point or dtype.is_complex)
        assert_same_sketch(found, view)
        assert found == sketch_of(view.clone().contiguous())
    for view in (tensor[0, 0, 0], tensor[:0]):
        assert_same_sketch(sketch_of(view), view)


def test_pieces_that_start_inside_a_block(monkeypatch, few_rows):
    tensor = sample(torch.float32, 40, 5, 50)
    for piece, limit in ((300, 1 << 22), (64, 700), (1000, 1)):
        monkeypatch.setattr(torch_digest, "CPU_PIECE", piece)
        few_rows(limit)
        for view in (tensor, tensor.permute(2, 1, 0)):
            assert_same_sketch(sketch_of(view), view)


def test_a_device_without_float64_says_that_its_sketch_is_coarser(monkeypatch):
    monkeypatch.setattr(torch_digest, "widest_float", lambda device: torch.float32)
    tensor = torch.randn(300, 700, generator=torch.Generator().manual_seed(1))
    assert_same_sketch(sketch_of(tensor), tensor, SINGLE_ROUNDOFF)


def test_tensors_with_and_without_sketches_come_back_in_order():
    tensors = [sample(torch.float32, n) for n in (300, 1, 400)] + [torch.arange(9), sample(torch.bfloat16, 5)]
    asked = (True, True, False, True, True)
    handles = [
        BACKEND.begin_digest(t, statistics=True, sketch=s) for t, s in zip(tensors, asked, strict=True)
    ]
    found = BACKEND.finish_digests(handles)
    assert [one.sketch is not None for one in found] == [True, False, False, False, True]
    assert_same_sketch(found[0].sketch, tensors[0])
    assert_same_sketch(found[4].sketch, tensors[4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lanes_of_32_bits_give_the_same_fingerprints(dtype, monkeypatch):
    """As on an NPU. No product or sum of them leaves 32 bits: all bits set is the worst there is."""
    tensors = [sample(dtype, 60, 5, 41), sample(dtype, 7), sample(dtype, 60, 5, 41).permute(2, 0, 1)]
    if not dtype.is_complex and dtype is not torch.bool:
        worst = torch.full((9000 * dtype.itemsize,), 255, dtype=torch.uint8)
        tensors.append(worst.view(dtype))
    for tensor in tensors:
        wanted = expected(tensor, statistics=False)
        with CountCalls() as whole:
            assert digest(tensor, statistics=False) == wanted
        monkeypatch.setattr(torch_fingerprint, "short_lanes", lambda device: True)
        with CountCalls() as short:
            assert digest(tensor, statistics=False) == wanted
        monkeypatch.undo()
        assert short.calls > whole.calls  # it went another way


def test_a_large_tensor_at_the_sizes_in_use():
    tensor = sample(torch.bfloat16, 700, 300)
    assert tensor.numel() > 3 * torch_digest.CPU_PIECE
    assert_same(digest(tensor), expected(tensor))
    assert_same(digest(tensor.t()), expected(tensor.t()))


class FakeStream:
    def __init__(self):
        self.waited = []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.waited.append(event)


def test_keys_made_on_one_stream_are_waited_for_on_another(monkeypatch):
    """On the device, not on the host; and only where they were made elsewhere."""
    first, second = FakeStream(), FakeStream()
    keys, device = torch_tables.Table(torch_tables._blocks, least=64), torch.device("cpu")
    monkeypatch.setattr(torch_tables, "_stream", lambda _: first)
    for _ in range(2):
        keys.rows(0, 10, device)
    monkeypatch.setattr(torch_tables, "_stream", lambda _: second)
    keys.rows(5, 10, device)
    assert (first.waited, second.waited) == ([], [first])
    keys.rows(0, 65, device)  # grows, here
    assert second.waited == [first]


def test_histogram_of_accelerators_equals_the_one_of_cpus():
    part = sample(torch.float32, 3000)
    bins = (part.view(torch.int32) >> 23) & 0xFF
    assert torch.equal(torch_digest.histogram_by_scatter(bins), torch_digest.exponents(part))


def test_lazy_conjugate_and_negative_views_are_read_as_they_look():
    tensor = sample(torch.complex64, 4, 3)
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj())
    assert digest(tensor.conj().imag) == digest(tensor.conj().imag.resolve_neg().clone())


class ForbidWaiting(TorchDispatchMode):
    """Raises on every operation that makes the host wait for a device, or copies to another one."""

    FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        moved = kwargs.get("device") is not None or any(isinstance(arg, torch.device) for arg in args)
        if name in self.FORBIDDEN or (name in ("to", "_to_copy", "copy_") and moved):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **kwargs)


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_and_snapshot_never_wait(dtype, statistics):
    tensor = sample(dtype, 5, 4).t()
    with ForbidWaiting():
        BACKEND.begin_digest(tensor, statistics=True, sketch=True)
        handle = BACKEND.begin_digest(tensor, statistics=statistics)
        copy = BACKEND.snapshot(tensor)
    assert BACKEND.finish_digests([handle]) == [digest(copy, statistics=statistics)]


@pytest.mark.parametrize(
    "wait",
    [lambda t: t.sum().item(), lambda t: bool((t > 0).any()), lambda t: t.to("meta"), lambda t: t.nonzero()],
)
@pytest.mark.parametrize("inference", [False, True])
def test_the_guard_can_fail(wait, inference):
    with torch.inference_mode(inference), ForbidWaiting(), pytest.raises(AssertionError, match="waits"):
        wait(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_the_path_of_accelerators_needs_no_value(dtype):
    """Meta tensors have none, so whatever waits for one raises; they take the path of every accelerator."""
    tensor = torch.empty(3, 40, dtype=dtype, device="meta").t()
    sums = torch_digest.sums_of(tensor, statistics=True, sketch=True)
    assert [t.shape[0] for t in sums.integers[:2]] == [2, 256]
    assert (sums.sketch is not None) == dtype.is_floating_point
    with pytest.raises((RuntimeError, NotImplementedError)):
        tensor.sum().item()


def test_a_step_is_copied_to_the_host_at_once(monkeypatch):
    """Integers, numbers of two widths and sketches of many tensors come in one copy."""
    tensors = [sample(dtype, 3, 41) for dtype in DTYPES]
    both = {"statistics": True, "sketch": True}
    wanted = [BACKEND.finish_digests([BACKEND.begin_digest(t, **both)])[0] for t in tensors]
    copies, copy = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor) or copy(tensor))
    handles = [BACKEND.begin_digest(tensor, **both) for tensor in tensors]
    handles.append(BACKEND.begin_digest(tensors[0], statistics=False))
    handles.append(BACKEND.begin_digest(tensors[0][:0], statistics=True))
    found = BACKEND.finish_digests(handles)
    assert len(copies) == 1
    assert found[: len(wanted)] == wanted
    assert any(one.sketch is not None for one in found)


def test_nothing_is_disturbed():
    tensor = torch.nn.Parameter(sample(torch.float32, 6, 5))
    torch.manual_seed(3)
    before = (torch.get_rng_state(), tensor._version, tensor.grad, tensor.clone().detach())
    digest(tensor)
    BACKEND.snapshot(tensor)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert tensor._version == before[1]
    assert tensor.requires_grad
    assert tensor.is_leaf
    assert torch.equal(tensor.detach().view(torch.int32), before[3].view(torch.int32))
    (tensor * tensor)[1:].nan_to_num(0, 0, 0).sum().backward()  # autograd still works on it
    assert tensor.grad is not None


def test_a_later_write_does_not_change_what_was_seen():
    tensor = sample(torch.float32, 4, 4)
    wanted, bits = expected(tensor), BACKEND.to_host(BACKEND.snapshot(tensor)).bits
    handle, copy = BACKEND.begin_digest(tensor, statistics=True), BACKEND.snapshot(tensor)
    tensor.zero_()
    assert_same(BACKEND.finish_digests([handle])[0], wanted)
    assert (BACKEND.to_host(copy).bits == bits).all()


def test_inside_hooks_inference_mode_and_deterministic_mode():
    seen = []
    leaf = torch.ones(3, 4, requires_grad=True)
    middle = leaf * 2
    middle.register_hook(lambda grad: seen.append(BACKEND.begin_digest(grad, statistics=True)))
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        middle.expand(5, 3, 4).sum().backward()
        with torch.inference_mode():
            seen.append(BACKEND.begin_digest(torch.full((3, 4), 5.0).t(), statistics=True))
    finally:
        torch.use_deterministic_algorithms(was)
    wanted = digest(torch.full((3, 4), 5.0))
    assert BACKEND.finish_digests(seen) == [wanted, wanted]


def test_layout_and_names():
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)[1:, 2:].t()
    layout = BACKEND.layout(tensor)
    assert (layout.stride, layout.storage_offset, layout.contiguous, layout.format) == ((1, 6), 8, False, "")
    assert (BACKEND.shape(tensor), BACKEND.dtype(tensor)) == ((4, 3), "bfloat16")
    assert BACKEND.is_tensor(tensor)
    assert not BACKEND.is_tensor(3.0)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(3).to_sparse(), "dense"),
        (torch.empty(3, device="meta"), "dense"),
    ],
    ids=["sparse", "meta"],
)
def test_unreadable_tensors_are_refused(tensor, message):
    with pytest.raises(PrecisionError, match=message):
        BACKEND.begin_digest(tensor, statistics=True)


def test_freed_memory_is_refused():
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(PrecisionError, match="freed"):
        BACKEND.begin_digest(tensor, statistics=False)


class CountCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "statistics", "sketch", "limit"),
    [(torch.float32, True, False, 40), (torch.bfloat16, False, False, 22), (torch.float32, True, True, 56)],
)
def test_a_small_tensor_costs_few_calls(dtype, statistics, sketch, limit):
    tensor = sample(dtype, 8, 8)
    BACKEND.begin_digest(tensor, statistics=True, sketch=True)  # fills the tables
    with CountCalls() as count:
        BACKEND.begin_digest(tensor, statistics=statistics, sketch=sketch)
    assert 10 < count.calls <= limit


def test_digests_of_several_devices_come_back_in_order():
    tensors = [sample(torch.float32, n) for n in (3, 0, 5, 7)]
    handles = [BACKEND.begin_digest(tensor, statistics=True) for tensor in tensors]
    moved = [replace(h, device=torch.device("cpu", place % 2)) for place, h in enumerate(handles)]
    assert repr(BACKEND.finish_digests(moved)) == repr(BACKEND.finish_digests(handles))
    assert BACKEND.finish_digests([]) == []


def test_one_copy_to_the_host_per_kind_of_number():
    calls = []
    for records in (2, 30):
        handles = [BACKEND.begin_digest(sample(torch.float32, n), statistics=True) for n in range(1, records)]
        with CountCalls() as count:
            BACKEND.finish_digests(handles)
        calls.append(count.calls)
    assert calls[0] == calls[1] <= 15


class LargestTensor(TorchDispatchMode):
    """Remembers the largest memory of a result, other than the memory of ``given``."""

    def __init__(self, given):
        super().__init__()
        self.given = given.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self.given:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def test_temporary_memory_is_bounded(monkeypatch, few_rows):
    tensor = torch.zeros(1024, 512).t()  # 2 MiB, read through its strides
    monkeypatch.setattr(torch_digest, "CPU_PIECE", 1 << 10)
    few_rows(1)
    with LargestTensor(tensor) as largest:
        BACKEND.begin_digest(tensor, statistics=True)
    assert 0 < largest.bytes <= 2 * 8 * (1 << 10)


def test_unknown_backend_is_an_error():
    with pytest.raises(PrecisionError, match="jax"):
        load_backend("jax")
