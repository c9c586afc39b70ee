"""Bounds that grow with depth and with the length of sums: the formula, and what it reads of a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_precision.compare import load_policy, make_context
from mindspeed_precision.compare.depth import Depth, depth_of, numbered
from mindspeed_precision.compare.policy import Limit
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.records import Phase, RecordKey, Role
from mindspeed_precision.testing.fake_runs import LINEAR, write_fake_run

LAYERS = st.integers(1, 96)


def key(fqn="decoder.layers.0.mlp", phase=Phase.FPROP, role=Role.OUTPUT):
    return RecordKey(step=0, microbatch=0, phase=phase, fqn=fqn, role=role)


def depth(layers=4, *, dtype="float32", forward=64, backward=256, tokens=128):
    return Depth(
        offsets={"decoder.layers": 0},
        layers=layers,
        before=frozenset({"embedding.word_embeddings.weight"}),
        others=frozenset({"decoder.final_layernorm.weight", "output_layer.weight"}),
        forward=forward,
        backward=backward,
        tokens=tokens,
        dtype=dtype,
    )


def test_names_are_split_at_their_first_number():
    assert numbered("decoder.layers.11.mlp.experts.local_experts.3.linear_fc1") == ("decoder.layers", 11)
    assert numbered("0.weight") == ("", 0)
    assert numbered("embedding.word_embeddings.weight") is None
    assert numbered("linear_fc1.weight") is None


@pytest.mark.parametrize(
    ("fqn", "position"),
    [
        ("embedding", 0),
        ("embedding.word_embeddings.weight", 0),
        ("embedding.embedding_dropout", 0),
        ("decoder.layers.0.mlp.linear_fc1.weight", 1),
        ("decoder.layers.3", 4),
        ("decoder", 4),
        ("decoder.final_layernorm", 4),
        ("output_layer", 4),
        ("", 4),
    ],
)
def test_where_a_name_is(fqn, position):
    assert depth().position(fqn) == position


@given(layers=LAYERS, layer=st.integers(0, 95))
def test_a_gradient_has_passed_what_the_forward_pass_has_and_its_way_back(layers, layer):
    layer = min(layer, layers - 1)
    found, name = depth(layers), f"decoder.layers.{layer}.mlp.linear_fc1"
    forth = found.passed(key(name))
    back = found.passed(key(name, Phase.DGRAD, Role.GRAD_INPUT))
    assert forth == layer + 1
    assert back == layers + (layers - layer)
    assert found.passed(key(f"{name}.weight", Phase.REDUCE, Role.REDUCED_GRAD)) == back
    assert found.passed(key(name, Phase.WGRAD, Role.INPUT)) == forth
    assert found.passed(key("embedding.word_embeddings.weight", Phase.WGRAD, Role.WGRAD)) == 2 * layers
    assert found.passed(key("output_layer", Phase.DGRAD, Role.GRAD_OUTPUT)) == layers + 1


@given(
    layers=LAYERS,
    forward=st.integers(1, 1 << 17),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
)
def test_the_unit_is_that_of_the_formula_and_grows(layers, forward, dtype):
    found = depth(layers, dtype=dtype, forward=forward, backward=1, tokens=0)
    names = [f"decoder.layers.{layer}" for layer in range(layers)]
    units = [found.unit(key(name), dtype) for name in names]
    u = UNIT_ROUNDOFF[dtype]
    summed = u if dtype == "float64" else UNIT_ROUNDOFF["float32"]
    expected = [(u + summed * math.sqrt(forward)) * math.sqrt(2 + layer) for layer in range(layers)]
    assert units == pytest.approx(expected, rel=1e-12)
    assert units == sorted(units)
    assert units[-1] <= units[0] * math.sqrt(layers)
    backward = [found.unit(key(name, Phase.DGRAD, Role.GRAD_INPUT), dtype) for name in names]
    assert backward == sorted(backward, reverse=True)
    assert min(backward) >= max(units) * (1 - 1e-12)


def test_what_is_kept_wide_of_a_coarse_model_is_as_coarse():
    found = depth(dtype="bfloat16")
    gradient = key("decoder.layers.0.mlp.linear_fc1.weight", Phase.REDUCE, Role.REDUCED_GRAD)
    assert found.unit(gradient, "float32") == found.unit(gradient, "bfloat16")
    assert found.unit(gradient, "float32") > 1000 * depth().unit(gradient, "float32")


@given(maximum=st.floats(0, 1), rounding=st.floats(0, 50), growth=st.floats(0, 10), reach=st.floats(0, 1))
def test_a_bound_is_the_sum_of_its_terms(maximum, rounding, growth, reach):
    limit = Limit(metric="rel_frobenius", maximum=maximum, rounding=rounding, growth=growth)
    bound = limit.at(reach=reach, unit=1e-6)
    assert bound.maximum == pytest.approx(maximum + rounding * 1e-6 + growth * reach)
    assert bound.at(reach=reach, unit=1e-6) == bound


def test_what_is_read_of_a_run(tmp_path):
    run = load_run(write_fake_run(tmp_path / "run"))
    found = depth_of(run, "float32")
    assert (found.layers, found.offsets) == (2, {"decoder.layers": 0})
    assert found.position("embedding.word_embeddings") == 0
    assert found.position("output_layer") == 2
    assert found.position(LINEAR) == 2
    matrices = [p.shape for p in run.ranks[0].parameters if len(p.shape) == 2]
    assert found.forward == max(columns for _, columns in matrices)
    assert found.backward == max(rows for rows, _ in matrices)
    gradient = next(r for r in run.ranks[0].records if r.key.role is Role.GRAD_OUTPUT and r.key.step == 0)
    microbatches = run.ranks[0].microbatches[0]
    assert found.tokens == np.prod(gradient.shape[:-1]) * microbatches
    context = make_context(run, run, (), load_policy("cross_layout"))
    assert context.depth == found
