"""msprobe's names, and element types, in our words."""

from __future__ import annotations

import pytest

from mindspeed_precision.errors import DumpError
from mindspeed_precision.msprobe.names import parse_name
from mindspeed_precision.msprobe.tensors import element_type


@pytest.mark.parametrize(
    ("text", "path", "owner", "direction", "call", "chunk", "wrappers"),
    [
        (
            "Module.module.module.decoder.layers.0.mlp.linear_fc1.ColumnParallelLinear.forward.3",
            "decoder.layers.0.mlp.linear_fc1",
            "ColumnParallelLinear",
            "forward",
            3,
            None,
            2,
        ),
        ("Module.module.GPTModel.backward.0", "", "GPTModel", "backward", 0, None, 1),
        (
            "Module.1.module.decoder.layers.0.TransformerLayer.forward.0",
            "decoder.layers.0",
            None,
            None,
            0,
            1,
            1,
        ),
        ("Module.fc1.Linear.parameters_grad.1", "fc1", "Linear", "parameters_grad", 1, None, 0),
        (
            "Cell.network.embedding.Embedding.forward.0",
            "network.embedding",
            "Embedding",
            "forward",
            0,
            None,
            0,
        ),
    ],
)
def test_modules(text, path, owner, direction, call, chunk, wrappers):
    name = parse_name(text)
    assert name.is_module
    assert (name.path, name.call, name.chunk, name.wrappers) == (path, call, chunk, wrappers)
    assert owner is None or (name.owner, name.direction) == (owner, direction)


@pytest.mark.parametrize(
    ("text", "path", "direction", "call"),
    [
        ("Tensor.matmul.3.forward", "Tensor.matmul", "forward", 3),
        ("Functional.linear.0.backward", "Functional.linear", "backward", 0),
        ("Mint.nn.functional.relu.12.forward", "Mint.nn.functional.relu", "forward", 12),
    ],
)
def test_operations(text, path, direction, call):
    name = parse_name(text)
    assert not name.is_module
    assert (name.path, name.direction, name.call) == (path, direction, call)


def test_a_backward_call_belongs_to_a_forward_one():
    assert parse_name("Module.fc.backward.Linear.backward.2").forward == "Module.fc.backward.Linear.forward.2"
    assert parse_name("Tensor.mul.2.backward").forward == "Tensor.mul.2.forward"


@pytest.mark.parametrize(
    "text", ["", "Module", "Module.forward.0", "Tensor.matmul.forward", "a.b.-1.forward"]
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(DumpError, match="no name of msprobe"):
        parse_name(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        ("Float32", "float32"),
        ("torch.float8_e4m3fn", "float8_e4m3fn"),
        ("Bool", "bool"),
        ("Int64", "int64"),
    ],
)
def test_element_types(text, name):
    assert element_type(text) == name
