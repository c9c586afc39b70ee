"""In which way weights differ before the first step."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.records import Level, Severity
from mindspeed_precision.testing.fake_runs import EMBEDDING, plant, scaled

LINEAR = "decoder.layers.0.mlp.linear_fc1.weight"
TABLE = f"{EMBEDDING}.weight"


def initial(value, fqn=LINEAR):
    return plant(phase="init", role="param", fqn=fqn, value=value)


def test_equal_weights(verify):
    assert verify(both={"level": Level.TENSOR}) == {}
    assert verify.outcome("weights.initial_differs").exercised == 6


@pytest.mark.parametrize("level", [Level.STATISTICS, Level.TENSOR])
def test_a_factor(verify, level):
    found = verify(candidate={"plants": [initial(scaled(2))]}, both={"level": level})
    (finding,) = found["weights.scaled"]
    assert finding.where.fqn == LINEAR
    assert "2 times the baseline's" in finding.evidence[0]
    assert (finding.confidence > 0.9) == (level is Level.TENSOR)
    assert set(found) == {"weights.scaled"}


def test_a_square_transpose(verify):
    plants = [initial(lambda weight: weight.T.copy())]
    found = verify(candidate={"plants": plants}, both={"level": Level.TENSOR})
    assert found["weights.transposed"][0].where.fqn == LINEAR


def test_a_square_transpose_without_elements_is_a_permutation_that_is_not_told_apart(verify):
    found = verify(candidate={"plants": [initial(lambda weight: weight.T.copy())]})
    assert "not told apart from a transpose" in found["weights.permuted"][0].evidence[0]


def test_a_transpose_of_another_shape(verify):
    """Recorded so: a model that trains with it would not run."""
    turned = plant(phase="init", role="param", fqn=TABLE, recorded=lambda weight: weight.T.copy())
    found = verify(candidate={"plants": [turned]})
    (finding,) = found["weights.transposed"]
    assert "[11, 8] in the baseline, [8, 11] in the candidate" in finding.evidence[0]


def test_another_shape(verify):
    cut = plant(phase="init", role="param", fqn=LINEAR, recorded=lambda weight: weight[:4].copy())
    found = verify(candidate={"plants": [cut]})
    assert set(found) == {"weights.other_shape"}


def interleaved(weight):
    """Rows ``(heads, parts, d)`` as ``(parts, heads, d)``: the QKV order of another convention."""
    return weight.reshape(2, 2, 2, -1).transpose(1, 0, 2, 3).reshape(weight.shape).copy()


def test_rows_interleaved_by_head(verify):
    found = verify(candidate={"plants": [initial(interleaved)]}, both={"level": Level.TENSOR})
    (finding,) = found["weights.permuted"]
    assert "(2, 2, 2) as (2, 2, 2), interleaved by head or not" in finding.evidence[0]


def test_halves_swapped(verify):
    plants = [initial(lambda weight: np.roll(weight, 4, axis=0))]
    found = verify(candidate={"plants": plants}, both={"level": Level.TENSOR})
    assert "gate and up projection" in found["weights.permuted"][0].evidence[0]


def test_permutations_show_without_elements(verify):
    found = verify(candidate={"plants": [initial(interleaved)]})
    assert set(found) == {"weights.permuted"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_checkpoint_that_went_through_a_narrower_type(verify, dtype):
    def narrow(weight):
        if dtype == "float16":
            return weight.astype(np.float16).astype(np.float32)
        bits = weight.view(np.uint32) + np.uint32(0x7FFF) + ((weight.view(np.uint32) >> 16) & 1)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)

    plants = [plant(phase="init", role="param", value=narrow)]
    found = verify(candidate={"plants": plants}, both={"level": Level.TENSOR})
    (finding,) = found["weights.cast"]
    assert finding.severity is Severity.ERROR
    assert finding.evidence[0].endswith(f"the candidate's went through {dtype}")
    assert set(found) == {"weights.cast"}


def test_without_elements_a_cast_is_estimated(verify):
    plants = [plant(phase="init", role="param", value=lambda w: w.astype(np.float16).astype(np.float32))]
    found = verify(candidate={"plants": plants}, both={"level": Level.SKETCH})
    assert any("it is decided" in line for line in found["weights.cast"][0].evidence)


def test_other_draws_of_the_same_spread(verify):
    found = verify(candidate={"seed": 2})
    assert "weights.other_spread" not in found
    assert "6 of 6 parameters have other numbers" in found["weights.initial_differs"][0].title


def test_another_spread(verify):
    def wide(weight):
        return np.random.default_rng(9).normal(0, 3, weight.shape).astype(np.float32)

    found = verify(candidate={"plants": [initial(wide, TABLE)]})
    assert set(found) == {"weights.other_spread"}


def test_a_weight_that_was_never_initialised(verify):
    found = verify(candidate={"plants": [initial(np.zeros_like)]})
    assert set(found) == {"weights.other_spread"}


def test_without_initial_weights_it_says_so(verify):
    verify(candidate={"plants": [plant(phase="init", role="param", drop=True)]})
    assert "were not recorded" in verify.outcome("weights.initial_differs").skipped
