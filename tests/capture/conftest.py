from __future__ import annotations

from pathlib import Path

import pytest

SLOW = ("mixture", "recompute")
"""Configurations, by the start of their name, that run with the matrix only."""


@pytest.hookimpl(tryfirst=True)  # before the command line's -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the slow configurations of this folder to the matrix."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if item.path.parent == Path(__file__).parent and callspec and callspec.id.startswith(SLOW):
            item.add_marker(pytest.mark.matrix)


@pytest.fixture(scope="session")
def capture_scripts() -> Path:
    """Scripts that the tests start as processes of their own."""
    return Path(__file__).parent / "scripts"
