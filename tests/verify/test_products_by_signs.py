"""Random signs tell a product from what is none, and rounding never from a product."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.record.freivalds import excess, growth, own_error, signs

U = 2.0**-24


def operands(tokens, out, columns, seed=0, mean=0.0):
    draw = np.random.default_rng(seed)
    left, right = draw.normal(mean, 1, (tokens, out)), draw.normal(mean, 1, (tokens, columns))
    return left.astype(np.float32), right.astype(np.float32)


def judge(product, left, right, **changes):
    wide = [values.astype(np.float64) for values in (product, left, right)]
    return excess(*wide, **{"accumulator": U, "result": U, **changes})


@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 32, 128), (513, 7, 3), (2048, 16, 16)])
def test_a_product_in_float32_is_within_the_bound_in_any_order(shape, mean):
    left, right = operands(*shape, mean=mean)
    one_by_one = np.zeros((shape[1], shape[2]), np.float32)
    for row, other in zip(left, right, strict=True):  # the worst order there is: token by token
        one_by_one += np.outer(row, other)
    for product in (left.T @ right, one_by_one, left[::-1].T @ right[::-1]):
        assert judge(product, left, right).ratio <= 0.5


def test_numbers_that_are_all_rounded_one_way_are_within_the_bound():
    third = np.full((4096, 4), np.float32(1) / np.float32(3))
    product = np.zeros((4, 4), np.float32)
    for row in third:
        product += np.outer(row, row)
    assert judge(product, third, third).ratio <= 1


def test_a_result_of_16_bits_is_within_its_bound():
    left, right = operands(256, 32, 64)
    product = (left.T @ right).astype(np.float16)
    assert judge(product, left, right, result=2.0**-11).ratio <= 0.5
    left, right = operands(8, 32, 64)
    rounded = (left.T @ right).astype(np.float16)
    assert judge(rounded, left, right).ratio > 1  # where it calls itself float32, it was rounded on the way


FAULTS = {
    "one element": lambda p: np.where(np.arange(p.size).reshape(p.shape) == 70, p * 1.1, p),
    "a row": lambda p: np.where(np.arange(p.shape[0])[:, None] == 3, 0, p),
    "twice": lambda p: 2 * p,
    "two rows swapped": lambda p: p[[1, 0, *range(2, len(p))]],
    "nothing": lambda p: 0 * p,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_product_is_beyond_the_bound(fault):
    left, right = operands(256, 32, 64)
    found = judge(FAULTS[fault](left.T @ right), left, right)
    assert found.ratio > 1
    factor = {"twice": 2.0, "nothing": 0.0}.get(fault)
    assert factor is None or found.factor == pytest.approx(factor, abs=1e-6)


def test_the_row_is_named():
    left, right = operands(256, 32, 64)
    product = left.T @ right
    product[5, 6] += 1
    assert judge(product, left, right).row == 5


def test_operands_that_were_rounded_first_need_their_own_share():
    left, right = operands(64, 32, 64)
    short = [(values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for values in (left, right)]
    product = short[0].T @ short[1]
    assert judge(product, left, right).ratio > 1
    assert judge(product, left, right, operands=2.0**-10).ratio <= 1


def test_zeros_are_a_product_of_zeros():
    left, right = operands(8, 4, 4)
    assert judge(np.zeros((4, 4), np.float32), 0 * left, right).ratio == 0.0
    assert judge(np.ones((4, 4), np.float32), 0 * left, right).ratio > 1


def test_signs_are_the_same_every_time_and_balanced():
    assert np.array_equal(signs(1000), signs(1000))
    assert set(np.unique(signs(1000))) == {-1.0, 1.0}
    assert np.abs(signs(100_000).mean(axis=0)).max() < 0.02


def test_few_terms_have_the_worst_case_and_many_the_probable_one():
    assert growth(4, U) == pytest.approx(4 * U)
    assert growth(4096, U) == pytest.approx(4 * 64 * U)
    assert growth(2**24, U) < 1
    assert own_error(64, 64, double=False) > own_error(64, 64, double=True)


@pytest.mark.torch
class TestOnTheDevice:
    """The same numbers from torch, in pieces, of every dtype; and nothing of the training is touched."""

    @pytest.fixture
    def laws(self):
        pytest.importorskip("torch")
        from mindspeed_precision.backends import torch_laws

        return torch_laws

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_as_in_numpy(self, laws, dtype):
        import torch

        kind, result = getattr(torch, dtype), {"float32": U, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        left, right = (torch.from_numpy(values).to(kind) for values in operands(96, 32, 48))
        product = left.t() @ right
        numbers = [values.double().numpy() for values in (product, left, right)]
        expected = judge(*numbers, result=result).ratio
        found = float(laws.product_excess(product, left, right, ()))
        assert found == pytest.approx(expected, rel=1e-6)
        assert found < 1
        assert float(laws.product_excess(product * 1.5, left, right, ())) > 1

    def test_in_pieces_it_is_the_same(self, laws, monkeypatch):
        import torch

        left, right = (torch.from_numpy(values) for values in operands(100, 32, 48))
        product = left.t() @ right
        whole = float(laws.product_excess(product, left, right, ()))
        monkeypatch.setattr(laws, "_PIECE", 7 * 48)
        assert float(laws.product_excess(product, left, right, ())) == pytest.approx(whole, rel=1e-9)

    def test_a_difference_of_rounded_sums_has_their_share(self, laws):
        import torch

        left, right = (torch.from_numpy(values) for values in operands(64, 32, 48))
        before = torch.full((32, 48), 1e6)
        after = before + left.t() @ right
        assert float(laws.product_excess(after - before, left, right, ())) > 1
        assert float(laws.product_excess(after - before, left, right, (after, before))) < 1

    def test_what_is_not_finite_is_not_judged(self, laws):
        import torch

        left, right = (torch.from_numpy(values) for values in operands(8, 4, 4))
        left[0, 0] = float("inf")
        assert torch.isnan(laws.product_excess(left.t() @ right, left, right, ())).item()

    def test_random_generators_are_left_alone(self, laws):
        import torch

        state = torch.get_rng_state()
        left, right = (torch.from_numpy(values) for values in operands(8, 4, 5))
        laws.product_excess(left.t() @ right, left, right, ())
        assert torch.equal(state, torch.get_rng_state())

    @pytest.mark.parametrize(("total", "added"), [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
    def test_sums_are_counted(self, laws, total, added):
        import torch

        before = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(getattr(torch, total))
        gradient = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(getattr(torch, added))
        after = before.clone().add_(gradient)
        assert int(laws.not_the_sum(after, before, gradient)) == 0
        after[3] = 7.0
        assert int(laws.not_the_sum(after, before, gradient)) == 1
