"""Where real MindSpeed is: trees that are fetched beside this one and never committed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = {"MSP_MINDSPEED": "mindspeed/megatron_adaptor.py", "MSP_MEGATRON_LM": "megatron/training/training.py"}
MINDSPEED_NEEDS = ("scipy", "psutil", "six", "einops", "yaml", "pybind11")


@pytest.fixture(scope="session")
def mindspeed() -> dict[str, str]:
    """Return the environment in which MindSpeed and its Megatron-LM can be imported, or skip and say why."""
    paths = [ROOT]
    for variable, file in TREES.items():
        if not os.environ.get(variable):
            pytest.skip(
                f"{variable} is not set: it names a tree of {file.partition('/')[0]}; see docs/ascend.md"
            )
        tree = Path(os.environ[variable]).resolve()
        assert (tree / file).is_file(), f"{variable}: {tree} has no {file}"
        paths.append(tree)
    missing = [name for name in MINDSPEED_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"MindSpeed imports {', '.join(missing)}, not installed here: make mindspeed installs them"
        )
    inherited = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])])}
