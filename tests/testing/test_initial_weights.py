"""Weights that two frameworks start from."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.errors import ConfigError, DumpError
from mindspeed_precision.testing.initial_weights import initial_weights, load_weights, save_weights

SHAPES = {
    "decoder.layers.0.input_layernorm.weight": (8,),
    "decoder.layers.0.input_layernorm.bias": (8,),
    "decoder.layers.0.mlp.linear_fc1.weight": (32, 8),
    "decoder.layers.0.mlp.linear_fc1.bias": (32,),
}


def test_a_weight_depends_on_its_name_and_the_seed_and_not_on_the_others():
    whole = initial_weights(SHAPES, seed=1)
    alone = initial_weights({"decoder.layers.0.mlp.linear_fc1.weight": (32, 8)}, seed=1)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert np.array_equal(whole[name], alone[name])
    assert not np.array_equal(whole[name], initial_weights(SHAPES, seed=2)[name])
    assert 0.01 < whole[name].std() < 0.03
    assert whole["decoder.layers.0.input_layernorm.weight"].tolist() == [1.0] * 8
    assert whole["decoder.layers.0.input_layernorm.bias"].tolist() == [0.0] * 8


def test_a_file_gives_the_same_bits_back(tmp_path):
    weights = initial_weights(SHAPES, seed=1)
    save_weights(tmp_path / "new" / "weights.safetensors", weights)
    back = load_weights(tmp_path / "new" / "weights.safetensors", SHAPES)
    assert all(back[name].tobytes() == weights[name].tobytes() for name in SHAPES)


def test_another_model_s_weights_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_weights(path, initial_weights(SHAPES, seed=1))
    with pytest.raises(ConfigError, match=r"output_layer\.weight"):
        load_weights(path, {**SHAPES, "output_layer.weight": (4, 8)})
    with pytest.raises(DumpError, match="linear_fc1"):
        load_weights(path, {**SHAPES, "decoder.layers.0.mlp.linear_fc1.bias": (16,)})
