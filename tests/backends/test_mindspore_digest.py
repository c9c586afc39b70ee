"""The MindSpore backend: same numbers as the definition, nothing disturbed; run inside MindSpore."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", exc_type=ImportError)

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from mindspore import Parameter, Tensor, mint, nn  # noqa: E402
from tensor_cases import LAYOUTS, WIDTHS, TensorCase, random_bits, tensor_cases  # noqa: E402
from tensor_making import mindspore_tensor  # noqa: E402

from mindspeed_precision.backends import load_backend  # noqa: E402
from mindspeed_precision.backends.base import HostTensor  # noqa: E402
from mindspeed_precision.errors import PrecisionError  # noqa: E402
from mindspeed_precision.record.sketch import has_sketch  # noqa: E402
from mindspeed_precision.record.statistics import digest_host  # noqa: E402
from mindspeed_precision.records import Part, Placement, Split  # noqa: E402

pytestmark = pytest.mark.mindspore

BACKEND = load_backend("mindspore")
CASES = tensor_cases()


def digest(tensor, *, statistics=True):
    (found,) = BACKEND.finish_digests([BACKEND.begin_digest(tensor, statistics=statistics)])
    return found


def expected(case):
    return digest_host(HostTensor(bits=case.logical(), dtype=case.dtype), statistics=True)


def rounded(digest):
    """Return the digest with the sums, whose order is not defined, at ten digits."""
    statistics = digest.statistics
    mean, l2_norm = (float(f"{value:.10g}") for value in (statistics.mean, statistics.l2_norm))
    return replace(digest, statistics=replace(statistics, mean=mean, l2_norm=l2_norm))


def ones(*shape):
    return Tensor(np.ones(shape, np.float32))


def assert_reads(case):
    tensor = mindspore_tensor(case)
    shape, layout = tuple(tensor.shape), BACKEND.layout(tensor)
    # repr: NaN moments of empty tensors compare equal
    assert repr(rounded(digest(tensor))) == repr(rounded(expected(case)))
    assert (BACKEND.to_host(BACKEND.snapshot(tensor)).bits == case.logical()).all()
    assert BACKEND.dtype(tensor) == case.dtype
    assert BACKEND.shape(tensor) == shape == case.logical().shape[: len(shape)]
    assert BACKEND.layout(tensor) == layout


def test_there_are_enough_tensors():
    assert len(CASES) >= 200
    assert len({expected(case).fingerprint for case in CASES if case.logical().size}) > 200


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_tensor_agrees_with_the_definition(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert_reads(case)


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name)
def test_sketches_agree_with_the_definition(case):
    host = HostTensor(bits=case.logical(), dtype=case.dtype)
    found = BACKEND.begin_digest(mindspore_tensor(case), statistics=True, sketch=True)
    assert found.sketch == digest_host(host, statistics=True, sketch=True).sketch
    if host.bits.itemsize < 8:  # any sum of random float64 may be beyond float64
        assert (found.sketch is not None) == has_sketch(host.dtype, host.bits.size)


@given(
    dtype=st.sampled_from(sorted(WIDTHS)),
    shape=st.lists(st.integers(0, 5), max_size=4),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_any_tensor_agrees_with_the_definition(dtype, shape, seed, data):
    order = data.draw(st.permutations(range(len(shape))))
    views = [("permute", tuple(order))] if order else []
    sizes = [shape[dim] for dim in order]
    for dim, size in enumerate(sizes):
        start = data.draw(st.integers(0, size))
        views.append(("slice", dim, start, data.draw(st.integers(start, size)), data.draw(st.integers(1, 3))))
    memory = random_bits(np.random.default_rng(seed), dtype, tuple(shape))
    assert_reads(TensorCase(name="drawn", dtype=dtype, memory=memory, views=tuple(views)))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "empty" not in name])
def test_layout_is_the_one_of_the_same_numpy_view(layout):
    (case,) = (case for case in CASES if case.name == f"float32-{layout}")
    view = case.logical()
    found = BACKEND.layout(mindspore_tensor(case))
    offset = (view.__array_interface__["data"][0] - case.memory.__array_interface__["data"][0]) // 4
    assert found.storage_offset == offset
    assert found.contiguous == view.flags.c_contiguous
    steps = [stride // 4 for stride in view.strides]
    real = [place for place, size in enumerate(view.shape) if size > 1]  # of one element the step is free
    assert [found.stride[place] for place in real] == [steps[place] for place in real]


def test_the_digest_of_a_view_is_the_one_of_its_copy():
    tensor = mindspore_tensor(next(case for case in CASES if case.name == "bfloat16-offset_and_permuted"))
    assert not tensor.is_contiguous()
    assert digest(tensor) == digest(tensor.contiguous())
    assert digest(tensor).fingerprint != digest(tensor.permute(2, 1, 0)).fingerprint
    assert not tensor.is_contiguous()


def test_bits_only_where_the_numbers_are_unknown():
    tensor = Tensor(np.arange(4, dtype=np.float32), mindspore.hifloat8)
    bits = tensor.asnumpy().view(np.uint8)
    found = digest(tensor)
    assert found == digest_host(HostTensor(bits=bits, dtype="hifloat8"), statistics=False)
    assert BACKEND.dtype(tensor) == "hifloat8"


def step_of_adam():
    parameter = Parameter(ones(4, 3), name="weight")
    optimizer = nn.Adam([parameter], learning_rate=0.1)
    return parameter, lambda: optimizer((ones(4, 3),))


def copy_into():
    tensor = ones(4, 3)
    return tensor, lambda: tensor.copy_(ones(4, 3) * 5)


def write_one_element():
    tensor = ones(4, 3)

    def write():
        tensor[1, 2] = 7.0

    return tensor, write


def write_under_a_transpose():
    tensor = ones(4, 3)
    return tensor.t(), lambda: tensor.copy_(ones(4, 3) * 5)


@pytest.mark.parametrize("make", [step_of_adam, copy_into, write_one_element, write_under_a_transpose])
def test_a_later_write_does_not_change_what_was_seen(make):
    tensor, write = make()
    before = digest(ones(*tensor.shape))
    handle, copy = BACKEND.begin_digest(tensor, statistics=True), BACKEND.snapshot(tensor)
    write()
    assert BACKEND.finish_digests([handle]) == [before]
    assert digest_host(BACKEND.to_host(copy), statistics=True) == before
    assert digest(tensor) != before, "the write did not happen: this test shows nothing"


def test_without_a_copy_the_write_would_show():
    """What ``asnumpy`` gives is the tensor's own memory; were it not, the test above could not fail."""
    parameter, write = step_of_adam()
    alias = parameter.asnumpy()
    write()
    assert (alias != 1).all()


def weighted(weight, x, look):
    hidden = look(mint.matmul(x, weight.t()))
    return (look(hidden.t()) * look(hidden * hidden).t()).sum()


@pytest.mark.parametrize("look", [lambda tensor: tensor, None], ids=["healthy twin", "digest"])
def test_gradients_are_those_without_us(look):
    seen = []

    def read(tensor):
        seen.append((BACKEND.begin_digest(tensor, statistics=True), BACKEND.snapshot(tensor)))
        return tensor

    look = look or read
    random = np.random.default_rng(3)
    weight = Parameter(Tensor(random.normal(size=(4, 3)).astype(np.float32)), name="weight")
    x = Tensor(random.normal(size=(5, 3)).astype(np.float32))
    look(weight)
    loss, grads = mindspore.value_and_grad(lambda: weighted(weight, x, look), None, [weight])()
    hidden = x.asnumpy() @ weight.asnumpy().T
    wanted = (3 * hidden**2).T @ x.asnumpy()
    np.testing.assert_allclose(grads[0].asnumpy(), wanted, rtol=1e-5)
    np.testing.assert_allclose(loss.asnumpy(), (hidden**3).sum(), rtol=1e-5)
    bare, bare_grads = mindspore.value_and_grad(
        lambda: weighted(weight, x, lambda tensor: tensor), None, [weight]
    )()
    assert digest(bare) == digest(loss)
    assert digest(bare_grads[0]) == digest(grads[0])
    assert weight.requires_grad


def tape():
    """Return MindSpore's own tape: what switches it on, and what runs back over it."""
    c_expression = pytest.importorskip("mindspore._c_expression")
    if not hasattr(c_expression, "run_backward"):
        pytest.skip("this MindSpore has no tape of its own")
    from mindspore.common.api import _pynative_executor

    return _pynative_executor.set_grad_flag, c_expression.run_backward


def test_the_tape_does_not_see_a_digest():
    switch, run_backward = tape()
    switch(True)
    try:
        leaf = Parameter(ones(4, 3) * 2, name="leaf")
        hooked = []
        product = leaf * leaf
        product.register_hook(lambda grad: hooked.append(BACKEND.begin_digest(grad, statistics=True)))
        node = product._grad_node
        before = (node.name(), len(node.next_functions))
        digest(product.t())
        BACKEND.snapshot(product)
        digest(leaf)
        assert (product._grad_node.name(), len(product._grad_node.next_functions)) == before
        assert leaf._is_leaf
        assert leaf._grad is None
        run_backward((product.sum(),), (Tensor(1.0),), False, False, (), accumulate_grad=True)
    finally:
        switch(False)
    assert (leaf._grad.asnumpy() == 4).all()
    assert hooked == [digest(ones(4, 3))]


def test_no_random_number_is_drawn():
    mindspore.set_seed(5)
    tensor = ones(4, 3).t()
    state, drawn = mindspore.get_rng_state().asnumpy().copy(), np.random.get_state()[1].copy()
    digest(tensor)
    BACKEND.snapshot(tensor)
    assert (mindspore.get_rng_state().asnumpy() == state).all()
    assert (np.random.get_state()[1] == drawn).all()


def without_values():
    return Tensor(shape=(2, 3), dtype=mindspore.float32, init=mindspore.common.initializer.Normal())


def sparse():
    return mindspore.COOTensor(Tensor([[0, 1], [1, 2]]), Tensor([1.0, 2.0]), (3, 4))


def on_meta():
    try:
        return mint.empty((2, 3), device="meta")
    except (RuntimeError, TypeError, ValueError):
        pytest.skip("this MindSpore has no device meta")


def freed():
    tensor = ones(2, 3) * 2
    tensor.untyped_storage().resize_(0)
    return tensor


def of_packed_integers():
    return Tensor(np.ones(2, np.int8), mindspore.qint4x2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_values, "without values"),
        (sparse, "found COOTensor, expected a dense tensor"),
        (on_meta, "device meta"),
        (freed, "freed"),
        (of_packed_integers, "element type"),
    ],
)
def test_unreadable_tensors_are_refused(make, message):
    tensor = make()
    with pytest.raises(PrecisionError, match=message):
        BACKEND.begin_digest(tensor, statistics=True)
    with pytest.raises(PrecisionError, match=message):
        BACKEND.snapshot(tensor)


class Failing(Tensor):
    def asnumpy(self):
        raise TypeError("Select CPU operator[MatMul] fail!\n\n- C++ Call Stack")


def test_an_error_that_surfaces_while_reading_is_passed_on():
    with pytest.raises(PrecisionError, match=r"MatMul\] fail! - C\+\+ .*; without launch_blocking, look at"):
        BACKEND.begin_digest(Failing(np.ones(3, np.float32)), statistics=False)


def test_a_tensor_without_values_stays_without():
    tensor = without_values()
    with pytest.raises(PrecisionError):
        BACKEND.begin_digest(tensor, statistics=False)
    assert tensor.has_init
    tensor.init_data()
    assert digest(tensor).fingerprint


def test_the_named_parameter_is_named():
    parameter = Parameter(ones(2, 3), name="decoder.weight")
    parameter.untyped_storage().resize_(0)
    with pytest.raises(PrecisionError) as caught:
        BACKEND.begin_digest(parameter, statistics=False)
    assert caught.value.where == "decoder.weight"


def test_what_is_a_tensor():
    assert BACKEND.is_tensor(ones(2))
    assert BACKEND.is_tensor(Parameter(ones(2), name="p"))
    assert not BACKEND.is_tensor(sparse())
    assert not BACKEND.is_tensor(np.ones(2))


def test_digests_come_back_in_order():
    tensors = [ones(n) for n in (3, 0, 5, 7)]
    handles = [BACKEND.begin_digest(tensor, statistics=False) for tensor in tensors]
    assert BACKEND.finish_digests(handles) == [digest(tensor, statistics=False) for tensor in tensors]
    assert BACKEND.finish_digests([]) == []


def test_shards_are_numbered_as_the_whole_and_add_up():
    whole = np.random.default_rng(5).standard_normal((6, 8)).astype(np.float32)
    expected = digest_host(HostTensor(bits=whole.view(np.uint32), dtype="float32"), statistics=True)
    parts = []
    for rank in range(2):
        placement = Placement(shape=(6, 8), splits=(Split(dim=1, blocks=((4 * rank, 4),)),))
        held = Tensor(np.ascontiguousarray(whole[:, 4 * rank : 4 * rank + 4]))
        part = Part(placement=placement, start=0, stop=24)
        parts.append(load_backend("mindspore").begin_placed_digest(held, part, statistics=True))
    mask = (1 << 64) - 1
    assert sum(one.fingerprint for one in parts) & mask == expected.fingerprint
    assert sum(one.unordered for one in parts) & mask == expected.unordered
    assert max(one.statistics.maximum for one in parts) == expected.statistics.maximum


def test_a_part_of_another_size_is_refused():
    part = Part(placement=Placement(shape=(4,), splits=(Split(dim=0, blocks=((0, 2),)),)), start=0, stop=2)
    with pytest.raises(PrecisionError, match="not the part of the parameter"):
        load_backend("mindspore").begin_placed_digest(Tensor(np.ones(3, np.float32)), part, statistics=True)
