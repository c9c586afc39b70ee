"""Canonical names do not depend on wrappers, pipeline stages or expert ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from mindspeed_precision.backends.torch_capture import TorchCapture  # noqa: E402
from mindspeed_precision.capture import names as naming  # noqa: E402
from mindspeed_precision.errors import PrecisionError  # noqa: E402

BACKEND = TorchCapture()
pytestmark = pytest.mark.torch


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.fc = nn.Linear(2, 2)


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.local_experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(count))


class MoE(nn.Module):
    def __init__(self, indices):
        super().__init__()
        self.local_expert_indices = indices
        self.experts = Experts(len(indices))


class Stage(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in numbers)


def test_wrappers_leave_no_trace():
    stage = Stage([1])
    plain = naming.canonical_names(BACKEND, [stage])
    wrapped = naming.canonical_names(BACKEND, [Wrapper(Wrapper(stage))])
    assert naming.unwrap(BACKEND, Wrapper(Wrapper(stage))) is stage
    assert [fqn for fqn, _ in plain.parameters] == [fqn for fqn, _ in wrapped.parameters]
    assert [fqn for fqn, _ in plain.parameters] == ["layers.0.fc.weight", "layers.0.fc.bias"]


def test_layer_numbers_are_global_on_a_later_pipeline_stage():
    names = naming.canonical_names(BACKEND, [Stage([5, 6])])
    assert {fqn for fqn, _ in names.parameters} == {
        f"layers.{layer}.fc.{kind}" for layer in (4, 5) for kind in ("weight", "bias")
    }


def test_expert_numbers_are_global_on_a_later_expert_rank():
    names = naming.canonical_names(BACKEND, [MoE([2, 3])])
    assert [fqn for fqn, _ in names.parameters] == [
        "experts.local_experts.2.weight",
        "experts.local_experts.3.weight",
    ]


def test_a_number_that_is_no_layer_number_stays():
    names = naming.canonical_names(BACKEND, [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
    assert [fqn for fqn, _ in names.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_tied_weight_has_one_name_and_an_alias():
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    names = naming.canonical_names(BACKEND, [model])
    assert [fqn for fqn, _ in names.parameters] == ["embedding.weight"]
    assert names.aliases == {"head.weight": "embedding.weight"}


def test_a_module_registered_twice_keeps_its_first_name():
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"first": shared, "second": shared})
    names = naming.canonical_names(BACKEND, [model])
    assert [fqn for fqn, _ in names.modules] == ["", "first"]


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(PrecisionError, match=r"layers\.0\.fc\.weight: two parameters have one name"):
        naming.canonical_names(BACKEND, [Stage([1]), Stage([1])])
    assert len(naming.canonical_names(BACKEND, [Stage([1]), Stage([2])]).parameters) == 4
