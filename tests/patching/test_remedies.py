"""The remedies on an autograd function whose backward reads like Megatron's parallel linear."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from mindspeed_precision.errors import PatchError  # noqa: E402
from mindspeed_precision.patching.declare import Effect, load_declarations, select  # noqa: E402
from mindspeed_precision.patching.lookup import raw_attribute  # noqa: E402
from mindspeed_precision.patching.remedies import (  # noqa: E402
    split_by_slices,
    wgrad_contiguous,
    wgrad_contiguous_operands,
    wgrad_transposed_operands,
)
from mindspeed_precision.patching.session import PatchSession  # noqa: E402

pytestmark = pytest.mark.torch

N, O, I = 6, 4, 5  # noqa: E741  tokens, out, in


def by_method(grad_output, total_input):
    return grad_output.t().matmul(total_input)


def by_function(grad_output, total_input):
    wgrad = torch.empty(grad_output.shape[1], total_input.shape[1])
    torch.matmul(grad_output.t(), total_input, out=wgrad)
    return wgrad


def by_operator(grad_output, total_input):
    return grad_output.T @ total_input


def by_transpose(grad_output, total_input):
    return torch.mm(grad_output.transpose(0, 1), total_input)


def by_addmm(grad_output, total_input):
    return torch.zeros(O, I).addmm_(grad_output.t(), total_input)


def materialised(grad_output, total_input):
    return grad_output.t().contiguous().matmul(total_input)


RECIPES = [by_method, by_function, by_operator, by_transpose, by_addmm]


class Operands(TorchFunctionMode):
    """Strides of the left operands of every GEMM, in order."""

    def __init__(self):
        super().__init__()
        self.strides = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("matmul", "mm", "__matmul__"):
            self.strides.append((tuple(args[0].shape), args[0].stride()))
        if func.__name__ == "addmm_":
            self.strides.append((tuple(args[1].shape), args[1].stride()))
        return func(*args, **(kwargs or {}))


class Context:
    gradient_accumulation_fusion = False


def backward_by(recipe, weight, total_input):
    def backward(ctx, grad_output):
        grad_input = grad_output.matmul(weight)
        grad_output = grad_output.contiguous().view(-1, O)
        return grad_input, recipe(grad_output, total_input), grad_output.sum(dim=0)

    return backward


@pytest.fixture
def numbers():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(O, I, generator=generator)
    return weight, torch.randn(N, I, generator=generator), torch.randn(N, O, generator=generator)


@pytest.mark.parametrize("recipe", [*RECIPES, materialised])
@pytest.mark.parametrize(
    ("remedy", "strides"), [(wgrad_contiguous_operands, (N, 1)), (wgrad_transposed_operands, (1, O))]
)
def test_only_the_left_operand_of_the_wgrad_gemm_changes(numbers, recipe, remedy, strides):
    weight, total_input, grad_output = numbers
    backward = backward_by(recipe, weight, total_input)
    expected = backward(Context(), grad_output)
    with Operands() as seen:
        got = remedy(backward, None, (Context(), grad_output), {})
    assert seen.strides == [((N, O), (O, 1)), ((O, N), strides)]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(N, O), (O, O)])
def test_dgrad_of_a_transposed_gradient_is_left_alone(numbers, shape):
    """Even where the gradient itself arrives as a transposed view, and where every shape is the same."""
    tokens, _ = shape
    weight, total_input = torch.randn(O, O), torch.randn(tokens, O)
    grad_output = torch.randn(O, tokens).t()
    backward = backward_by(by_method, weight, total_input)
    with Operands() as seen:
        wgrad_contiguous_operands(backward, None, (Context(), grad_output), {})
    assert seen.strides == [((tokens, O), (1, tokens)), ((O, tokens), (tokens, 1))]


def test_nothing_changes_outside_the_call(numbers):
    weight, total_input, grad_output = numbers
    wgrad_contiguous_operands(backward_by(by_method, weight, total_input), None, (Context(), grad_output), {})
    with Operands() as seen:
        by_method(grad_output, total_input)
    assert seen.strides == [((O, N), (1, O))]


@pytest.mark.parametrize("remedy", [wgrad_contiguous_operands, wgrad_transposed_operands, wgrad_contiguous])
def test_a_fused_kernel_is_an_error_not_a_silent_miss(numbers, remedy):
    class Fused:
        gradient_accumulation_fusion = True

    with pytest.raises(PatchError, match="no-gradient-accumulation-fusion"):
        remedy(lambda ctx, grad_output: (grad_output, None, None), None, (Fused(), numbers[2]), {})


def by_transposed_result(grad_output, total_input):
    return total_input.t().matmul(grad_output).t()


def test_wgrad_contiguous_changes_where_dw_lies_and_no_bit(numbers):
    weight, total_input, grad_output = numbers
    backward = backward_by(by_transposed_result, weight, total_input)
    expected = backward(Context(), grad_output)
    got = wgrad_contiguous(backward, None, (Context(), grad_output), {})
    assert (expected[1].stride(), got[1].stride()) == ((1, O), (I, 1))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_wgrad_contiguous_leaves_a_frozen_weight_alone(numbers):
    got = wgrad_contiguous(lambda ctx, grad: (grad, None), None, (Context(), numbers[2]), {})
    assert got == (numbers[2], None)


@pytest.mark.parametrize(
    ("sections", "dim"), [(2, 0), (4, 0), (3, 1), (2, -1), ([1, 4], 1), ([2, 0, 4], 0), (9, 0)]
)
def test_split_by_slices_gives_the_views_and_gradients_of_split(sections, dim):
    def run(split):
        leaf = torch.arange(30.0).reshape(6, 5).requires_grad_()
        parts = split(leaf * 1, sections, dim=dim)
        sum((part.t() * (index + 1) ** 2).pow(2).sum() for index, part in enumerate(parts)).backward()
        return [part.detach() for part in parts], leaf.grad

    parts, grad = run(torch.split)
    sliced, sliced_grad = run(lambda *args, **kwargs: split_by_slices(torch.split, None, args, kwargs))
    assert len(parts) == len(sliced)
    assert all(
        torch.equal(one, two) and one.stride() == two.stride() for one, two in zip(parts, sliced, strict=True)
    )
    assert torch.equal(grad, sliced_grad)


def autograd_function(recipe):
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, weight):
            ctx.save_for_backward(input, weight)
            ctx.gradient_accumulation_fusion = False
            return torch.matmul(input, weight.t())

        @staticmethod
        def backward(ctx, grad_output):
            total_input, weight = ctx.saved_tensors
            grad_input, wgrad, _ = backward_by(recipe, weight, total_input)(ctx, grad_output)
            return grad_input, wgrad

    return Linear


def test_through_the_engine_and_autograd(numbers, monkeypatch):
    """The shipped declaration on a toy target, called by autograd, with an observer as capture has one.

    The observer is declared first, and still sees the operand that the GEMM really gets.
    """
    seen = []

    def observe(wrapped, instance, args, kwargs):
        with Operands() as operands:
            result = wrapped(*args, **kwargs)
        seen.append(operands.strides[-1])
        return result

    module = types.ModuleType("toy_layers")
    module.Linear, module.observe = autograd_function(by_method), observe
    monkeypatch.setitem(sys.modules, "toy_layers", module)
    (shipped,) = select(load_declarations(), names=["wgrad_contiguous_operands"])
    remedy = dataclasses.replace(shipped, target="toy_layers:Linear.backward", requires=())
    observer = dataclasses.replace(
        remedy, name="observer", wrapper="toy_layers:observe", effect=Effect.OBSERVE, opaque=False
    )
    before = raw_attribute(module.Linear, "backward")[0]
    weight, total_input, grad_output = numbers

    for declarations, expected in (([observer], (1, O)), ([observer, remedy], (N, 1)), ([observer], (1, O))):
        leaf = weight.clone().requires_grad_()
        with PatchSession(declarations, allow_external=True) as session:
            module.Linear.apply(total_input.requires_grad_(), leaf).backward(grad_output)
            assert [line.calls for line in session.audit()] == [1] * len(declarations)
        assert seen.pop() == ((O, N), expected)
        torch.testing.assert_close(leaf.grad, by_method(grad_output, total_input))
        assert raw_attribute(module.Linear, "backward")[0] is before
