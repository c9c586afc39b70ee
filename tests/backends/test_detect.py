"""Which framework computes is asked of what is loaded; a command line that says otherwise is refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mindspeed_precision.backends import detect
from mindspeed_precision.errors import PrecisionError


class NativeTensor:
    """What stands for MindSpore's tensor."""


class ShimTensor(NativeTensor):
    """A torch tensor that is MindSpore underneath."""


def module(name, tensor):
    made = ModuleType(name)
    made.Tensor = tensor
    made.__file__ = f"/somewhere/{name}/__init__.py"
    return made


@pytest.fixture
def loaded(monkeypatch):
    """Return a function that makes ``sys.modules`` hold the given frameworks and no other."""

    def load(*, torch=None, mindspore=None):
        modules = {name: value for name, value in sys.modules.items() if name not in ("torch", "mindspore")}
        modules |= {"torch": module("torch", torch)} if torch else {}
        modules |= {"mindspore": module("mindspore", mindspore)} if mindspore else {}
        monkeypatch.setattr(detect, "sys", SimpleNamespace(modules=modules))

    return load


SIDES = [
    ({"torch": object}, detect.TORCH),
    ({"torch": object, "mindspore": NativeTensor}, detect.TORCH),  # both installed, torch is itself
    ({"torch": ShimTensor, "mindspore": NativeTensor}, detect.TORCH_ON_MINDSPORE),
    ({"mindspore": NativeTensor}, detect.MINDSPORE),
    ({}, None),
]


@pytest.mark.parametrize(("modules", "expected"), SIDES)
def test_the_framework_is_what_its_tensors_are(loaded, modules, expected):
    loaded(**modules)
    assert detect.loaded_framework() == expected


def test_no_framework_is_one_clear_error(loaded):
    loaded()
    with pytest.raises(PrecisionError, match="no framework is loaded"):
        detect.capture_backend()


@pytest.mark.parametrize("words", [["--ai-framework", "mindspore"], ["--x", "--ai-framework=mindspore"]])
def test_mindspore_was_asked_for_and_torch_computes(loaded, words):
    loaded(torch=object)
    with pytest.raises(PrecisionError, match=r"--ai-framework mindspore.*found PyTorch.*MSAdapter first"):
        detect.check_requested(words)


def test_torch_was_asked_for_and_mindspore_computes(loaded):
    loaded(torch=ShimTensor, mindspore=NativeTensor)
    with pytest.raises(PrecisionError, match="a torch that is MindSpore"):
        detect.check_requested(["--ai-framework", "pytorch"])


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ({"torch": object}, []),
        ({"torch": object}, ["--ai-framework", "pytorch"]),
        ({"torch": ShimTensor, "mindspore": NativeTensor}, []),
        ({"torch": ShimTensor, "mindspore": NativeTensor}, ["--ai-framework", "mindspore"]),
        ({"mindspore": NativeTensor}, ["--ai-framework", "mindspore"]),
    ],
)
def test_what_agrees_is_let_through(loaded, modules, words):
    loaded(**modules)
    detect.check_requested(words)


def test_where_both_are_loaded_the_model_decides(loaded):
    loaded(torch=object, mindspore=NativeTensor)
    cell = type("Cell", (), {})
    detect.sys.modules["mindspore"].nn = SimpleNamespace(Cell=cell)
    with detect.observing([cell()]):
        assert detect.loaded_framework() == detect.MINDSPORE
    with detect.observing(object()):
        assert detect.loaded_framework() == detect.TORCH
    assert detect.loaded_framework() == detect.TORCH
