"""A step that both runs begin with one state is a start: bounds count from it, nothing comes from before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision.align.forced import forced_steps, loaded_states
from mindspeed_precision.compare.reach import Reach
from mindspeed_precision.diagnose.own_faults import _distance
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import DumpError


def reach(*forced):
    rates = dict.fromkeys(range(4), 1e-3)
    return Reach(rates=rates, first=0, rate=0.0, amplification=1.0, note="", forced=frozenset(forced))


def test_the_sum_of_learning_rates_counts_from_a_forced_step():
    free, forced = reach(), reach(2)
    assert [round(1e3 * free.before(step)) for step in range(4)] == [0, 1, 2, 3]
    assert [round(1e3 * forced.before(step)) for step in range(4)] == [0, 1, 0, 1]
    assert [round(1e3 * forced.through(step)) for step in range(4)] == [1, 2, 1, 2]


def run(reference):
    return Run(path=Path("run"), manifest={"reference": reference}, ranks={})


def test_what_a_manifest_says_of_loaded_states():
    assert loaded_states(run(None)) == {}
    assert loaded_states(run({"run": "a", "states": {"0": "ab", "3": "cd"}})) == {0: "ab", 3: "cd"}
    assert forced_steps(run(None), run({"run": "a", "states": {"7": "ab"}}), (0, 1)) == frozenset()
    for damaged in ("a", {"run": "a"}, {"states": {"first": "ab"}}):
        with pytest.raises(DumpError, match="not a list of loaded states"):
            loaded_states(run(damaged))


@pytest.mark.parametrize("rows", [0, 1, 8])
def test_the_distance_of_a_gradient_to_the_product_of_its_operands(rows):
    """Sixteen vectors of signs estimate the worst row's error to a third or so."""
    generator = np.random.default_rng(3)
    grad_output, received = generator.normal(size=(64, 256)), generator.normal(size=(64, 48))
    wgrad = grad_output.T @ received
    wgrad[:rows] *= 1.5
    found = _distance(wgrad, grad_output.reshape(8, 8, 256), received.reshape(8, 8, 48))
    assert found < 1e-12 if rows == 0 else 0.2 < found < 1.2
