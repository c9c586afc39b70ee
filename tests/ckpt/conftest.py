from __future__ import annotations

import pytest

from mindspeed_precision.ckpt.examine import compare_checkpoints


@pytest.fixture
def answer():
    """Return a function that compares two checkpoints: findings by id, and what is said of each parameter."""

    def ask(one, two, **more):
        found = compare_checkpoints(one, two, **more)
        outcomes = {p["name"]: p for p in found.parameters if p["role"] == "param"}
        return found.examination, {f.id: f for f in found.examination.findings}, outcomes

    return ask
