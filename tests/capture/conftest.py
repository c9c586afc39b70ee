from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def capture_scripts() -> Path:
    """Scripts that the tests start as processes of their own."""
    return Path(__file__).parent / "scripts"
