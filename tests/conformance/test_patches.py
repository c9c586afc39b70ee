"""Every declaration, on real Megatron, in several orders of import, apply, undo and foreign re-apply.

A new declaration needs no new test code: see orders.py, which runs once for each version.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.patching.declare import load_declarations

pytestmark = [pytest.mark.megatron, pytest.mark.torch, pytest.mark.matrix]

REPOSITORY = Path(__file__).parents[2]
ROOT = Path(os.environ.get("MSP_MCORE") or REPOSITORY / ".mcore")
VERSIONS = ["0.12.1", "0.17.1"]
ORDERS = {
    "apply_undo",
    "apply_apply_undo_undo",
    "foreign_apply_undo",
    "foreign_apply_reapply",
    "apply_foreign",
    "call",
}


@functools.cache
def report_of(version):
    """Run every order on ``version`` once, in a process of its own."""
    tree = ROOT / version
    if "MSP_MCORE" not in os.environ and not tree.exists():
        pytest.skip("no Megatron installed side by side; `make test` does")
    path = os.pathsep.join([str(tree), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("orders.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("conformance report: ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(lines) == 1, done.stdout[-4000:]
    return json.loads(lines[0].partition(": ")[2])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("declaration", load_declarations(), ids=lambda declaration: declaration.name)
def test_declaration_in_every_order(version, declaration):
    report = report_of(version)
    outcome, refused, reason = report["outcomes"][declaration.name]
    if outcome != "ok":
        package = Path(*declaration.module.split(".")[:2])
        assert not refused or not (ROOT / version / package).is_dir(), reason
        pytest.skip(f"not here: {outcome}: {reason}")
    problems = report["orders"][declaration.name]
    assert set(problems) == ORDERS
    assert not any(problems.values()), problems


@pytest.mark.parametrize("version", VERSIONS)
def test_the_engine_imports_what_it_patches(version):
    assert report_of(version)["before_import"] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_linears_and_optimizers_are_covered(version):
    """The matrix is not empty: what every version must have was really run."""
    assert {"linear_forward", "linear_backward", "grad_ready", "fp32_step"} <= set(
        report_of(version)["orders"]
    )


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("forgets to undo", "the raw descriptor is not back"),
        ("forgets aliases", "an alias still shows the original"),
        ("sees nobody else", "evicted without a word"),
    ],
)
def test_the_guard_can_fail(fault, complaint):
    report = report_of("0.17.1")
    assert complaint in report["broken"][fault], f"{report['most_aliases']}: {report['broken'][fault]}"
