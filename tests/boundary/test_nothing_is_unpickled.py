"""Nothing is unpickled from a file that a user hands us: no module of the package calls what could."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mindspeed_precision"
UNPICKLE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUN_TEXT = {"eval", "exec"}
NO_FILE = {"testing/mindtorch/distributed.py"}  # from one rank of a run to another, as torch.distributed does
UNSAFE = {"pd.read_pickle", "pandas.read_pickle", "unsafe_load", "full_load"}


def imports(node):
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.module or "").partition(".")[0]]
    return []


def says(call, keyword, value):
    return any(
        k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is value
        for k in call.keywords
    )


def unsafe_call(call):
    """Return why a call could run what a file holds, or nothing."""
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if name in RUN_TEXT or name in UNSAFE or last in UNSAFE:
        return name
    if (
        last == "load"
        and name.partition(".")[0] in ("torch", "mindtorch")
        and not says(call, "weights_only", True)
    ):
        return f"{name} without weights_only=True"
    if last == "load" and name.partition(".")[0] in ("np", "numpy") and not says(call, "allow_pickle", False):
        return f"{name} without allow_pickle=False"
    if name == "yaml.load" and not any("Safe" in ast.unparse(k.value) for k in call.keywords):
        return f"{name} with a loader that is not safe"
    return ""


def holes(source):
    """Return what in a module could run code that a file holds, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [f"{node.lineno}: imports {name}" for name in imports(node) if name in UNPICKLE]
        if isinstance(node, ast.Call) and (why := unsafe_call(node)):
            found.append(f"{node.lineno}: {why}")
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_a_module_opens_no_door(path):
    found = holes(path.read_text("utf-8"))
    assert bool(found) == (path.relative_to(PACKAGE).as_posix() in NO_FILE), found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "eval(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
    ],
)
def test_the_walk_sees_a_door(source):
    assert holes(source)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "OmegaConf.load(path)",
        "yaml.load(text, Loader=yaml.CSafeLoader)",
        "model.eval()",
    ],
)
def test_what_is_safe_is_left_alone(source):
    assert holes(source) == []
