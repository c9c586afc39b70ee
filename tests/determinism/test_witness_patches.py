"""The declarations of ``patches/determinism.yaml``, installed by the engine, name the culprit."""

from __future__ import annotations

import pytest

from mindspeed_precision.config import data_directory, load_settings
from mindspeed_precision.determinism import algorithms
from mindspeed_precision.patching.declare import load_file
from mindspeed_precision.patching.session import PatchSession, Status

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def pinned():
    before = algorithms.snapshot()
    yield algorithms.pin_algorithms(load_settings().determinism)
    algorithms.reassert(before)


def flag() -> None:
    torch.backends.cudnn.benchmark = True


def downgrade() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


def debug_mode() -> None:
    torch.set_deterministic_debug_mode("default")


def precision() -> None:
    torch.set_float32_matmul_precision("high")


@pytest.mark.parametrize(
    "change", [flag, downgrade, debug_mode, precision], ids=lambda change: change.__name__
)
def test_installed_patches_name_the_culprit_and_removed_ones_do_not(pinned, change):
    declarations = load_file(data_directory("patches") / "determinism.yaml")
    site = f"{__file__}:{change.__code__.co_firstlineno + 1} in {change.__name__}"
    with PatchSession(declarations) as session:
        assert {audit.status for audit in session.audit()} == {Status.OUTERMOST}
        assert algorithms.reassert(pinned) == []
        change()
        (found,) = algorithms.reassert(pinned)
        assert found.culprit == site
    change()
    (found,) = algorithms.reassert(pinned)
    assert found.culprit == ""
