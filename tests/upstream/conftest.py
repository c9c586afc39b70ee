"""Where real MindSpeed is: trees that are fetched beside this one and never committed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = {"MSP_MINDSPEED": "mindspeed/megatron_adaptor.py", "MSP_MEGATRON_LM": "megatron/training/training.py"}
MINDSPEED_NEEDS = ("scipy", "psutil", "six", "einops", "yaml", "pybind11")


MINDSPEED_LLM_NEEDS = ("transformers", "datasets", "peft", "sentencepiece")


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
    if missing := _missing(MINDSPEED_NEEDS):
        pytest.skip(f"MindSpeed imports {missing}, not installed here: make mindspeed installs them")
    inherited = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])])}


@pytest.fixture(scope="session")
def mindspeed_llm(mindspeed: dict[str, str]) -> dict[str, str]:
    """Return the environment in which MindSpeed-LLM can be imported as well, or skip and say why."""
    if not (path := os.environ.get("MSP_MINDSPEED_LLM")):
        pytest.skip("MSP_MINDSPEED_LLM is not set: it names a tree of MindSpeed-LLM; see docs/ascend.md")
    tree = Path(path).resolve()
    assert (tree / "mindspeed_llm").is_dir(), f"MSP_MINDSPEED_LLM: {tree} has no mindspeed_llm"
    if missing := _missing(MINDSPEED_LLM_NEEDS):
        pytest.skip(f"MindSpeed-LLM imports {missing}: put what its requirements.txt lists on PYTHONPATH")
    return {**mindspeed, "PYTHONPATH": os.pathsep.join([mindspeed["PYTHONPATH"], str(tree)])}


def _missing(names: tuple[str, ...]) -> str:
    return ", ".join(name for name in names if importlib.util.find_spec(name) is None)
