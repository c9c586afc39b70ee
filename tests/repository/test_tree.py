"""The repository keeps its shape: agreed entries, agreed names, nothing of one machine, data that ships."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "Makefile",
    "README.md",
    "README.zh.md",
    "benchmarks",
    "configs",
    "docs",
    "launch",
    "mindspeed_precision",
    "patches",
    "pyproject.toml",
    "tests",
}
FORBIDDEN = {"utils", "util", "common", "helpers", "helper", "misc", "const", "consts", "constants"}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.splitlines() if (ROOT / path).exists()]


def forbidden_names(paths: list[str]) -> list[str]:
    return [
        path for path in paths if path.endswith(".py") and FORBIDDEN & set(Path(path).with_suffix("").parts)
    ]


def test_top_level(tracked):
    assert {path.split("/")[0] for path in tracked} <= TOP


def test_no_module_is_named_for_nothing(tracked):
    assert forbidden_names(tracked) == []


def test_a_forbidden_name_is_noticed():
    assert forbidden_names(["a/utils.py", "misc/b.py", "a/useful.py", "docs/utils.md"]) == [
        "a/utils.py",
        "misc/b.py",
    ]


def test_test_files_have_unique_names(tracked):
    names = [Path(path).name for path in tracked if re.match(r"tests/(.*/)?test_\w+\.py$", path)]
    assert Path(__file__).name in names
    assert sorted(names) == sorted(set(names)), "without packages pytest cannot tell them apart"


def test_the_package_is_typed():
    assert (ROOT / "mindspeed_precision" / "py.typed").is_file()


def absolute_home_paths(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])/(?:home|root|Users|mnt|work)/[\w.]+", text)


def test_no_path_of_one_machine(tracked):
    found = {}
    for path in tracked:
        if (
            Path(path).suffix in {".py", ".md", ".yaml", ".sh", ".toml", ""}
            and path != "tests/repository/test_tree.py"
        ):
            hits = absolute_home_paths((ROOT / path).read_text(encoding="utf-8", errors="replace"))
            if hits:
                found[path] = hits
    assert found == {}


def test_a_path_of_one_machine_is_noticed():
    assert absolute_home_paths("see /home/me/x and https://a.b/home/page") == ["/home/me"]


PROBE = """
import json, sys
from pathlib import Path
import mindspeed_precision
from mindspeed_precision.config import data_directory, load_settings
load_settings("quick")
print(json.dumps({
    "package": str(Path(mindspeed_precision.__file__).parent),
    **{name: str(data_directory(name)) for name in ("patches", "configs")},
    "files": sorted(p.name for name in ("patches", "configs") for p in data_directory(name).rglob("*.yaml")),
}))
"""


@pytest.fixture
def source(tmp_path, tracked):
    """A copy of what is tracked: a build must not need anything else, nor write into the checkout."""
    for path in tracked:
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tmp_path / "source" / path)
    return tmp_path / "source"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_data_is_found_from_an_installation(tmp_path, source, tracked, how):
    import json

    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    if how == "wheel":
        run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path / "dist", source, cwd=tmp_path)
        (wheel,) = (tmp_path / "dist").glob("*.whl")
        run(*pip, "install", "--no-deps", wheel, cwd=tmp_path)
        shutil.rmtree(source)
    else:
        run(*pip, "install", "--no-deps", "--editable", source, cwd=tmp_path)
    # its dependencies are those of the environment that runs the tests: nothing is downloaded twice
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(
        "\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n"
    )

    found = json.loads(run(python, "-c", PROBE, cwd=tmp_path))
    home = site if how == "wheel" else source
    for name in ("package", "patches", "configs"):
        assert Path(found[name]).is_relative_to(home.resolve()), found
    data = [Path(path) for path in tracked if path.startswith(("patches/", "configs/"))]
    wanted = sorted(path.name for path in data if path.suffix == ".yaml")
    assert found["files"] == wanted
    assert (Path(found["package"]) / "py.typed").is_file()
    assert (Path(found["package"]) / "backends" / "digest_kernel.c").is_file()
    assert (environment / "bin" / "mindspeed-precision").is_file()
