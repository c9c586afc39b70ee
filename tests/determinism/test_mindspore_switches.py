"""MindSpore's switch and seeds: pinned, read back, watched; in processes of their own, as it is set once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore")
pytestmark = pytest.mark.mindspore
ROOT = Path(__file__).parents[2]

PREPARE = """
import json, sys
import mindspore
from mindspeed_precision.config import DeterminismSettings
from mindspeed_precision.determinism import algorithms, pin, seeds
from mindspeed_precision.errors import DeterminismError, PrecisionError

def settings(**more):
    values = dict(enabled=True, seed=7, reseed=True, zero_dropout=False, strict=True)
    values["fill_uninitialized_memory"] = True
    return DeterminismSettings(**{**values, **more})
"""


def told(code):
    """Run ``code`` with MindSpore in a process of its own; return what it prints as JSON in its last line."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_switch_is_pinned_and_read_back():
    code = """
switches = algorithms.pin_algorithms(settings())
print(json.dumps([switches, mindspore.get_context("deterministic"), len(algorithms.reassert(switches))]))
"""
    assert told(code) == [{"deterministic_algorithms": True}, "ON", 0]


REFUSED = """
mindspore.set_deterministic(False)
try:
    found = algorithms.pin_algorithms(settings(strict={strict}))
except DeterminismError as error:
    found = str(error)
print(json.dumps(found))
"""


def test_a_switch_that_the_program_has_set_is_one_clear_error():
    found = told(REFUSED.format(strict=True))
    assert "deterministic_algorithms cannot be set any more" in found
    assert "determinism.strict=false" in found
    assert told(REFUSED.format(strict=False)) == {"deterministic_algorithms": False}
    reported = """
mindspore.set_deterministic(False)
found = pin(settings(strict=False), device="cpu").findings
print(json.dumps([one.title for one in found if "deterministic" in one.title]))
"""
    assert told(reported) == ["deterministic_algorithms could not be pinned any more"]


def test_a_seed_reaches_every_generator():
    code = """
import numpy as np
drawn = []
for _ in range(2):
    seeded = seeds.seed_everything(7)
    drawn.append([mindspore.get_rng_state().asnumpy().tolist(), float(np.random.rand())])
print(json.dumps([drawn[0] == drawn[1], list(seeded)]))
"""
    same, seeded = told(code)
    assert same
    assert seeded == ["python", "numpy", "mindspore"]
    state = "seeds.seed_everything(7); print(json.dumps(mindspore.get_rng_state().asnumpy().tolist()))"
    assert told(state) == told(state)


def test_a_seed_that_torch_would_take_is_refused():
    code = """
try:
    seeds.seed_everything(2**40)
except PrecisionError as error:
    print(json.dumps(str(error)))
"""
    assert "determinism.seed" in told(code)


def test_the_remedy_names_the_launcher_of_mindspore():
    code = """
import os
os.environ.pop("PYTHONHASHSEED", None)
try:
    pin(settings(), device="cpu")
    print(json.dumps("nothing was too late"))
except DeterminismError as error:
    print(json.dumps(str(error)))
"""
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + code],
        capture_output=True, text=True, check=True, cwd=ROOT, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert "launch/mindspore_cpu.sh" in json.loads(done.stdout.splitlines()[-1])
