"""Every hard dependency has wheels for aarch64, on which Ascend's servers run: pip resolves them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
COMPILED = {"numpy", "pandas", "pyyaml", "wrapt"}


def dependencies(*extras):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    return project["dependencies"] + [one for extra in extras for one in optional[extra]]


def resolved(requirements, python, tmp_path, machine="aarch64"):
    """Return the file of each package that pip would install there, by name; None where it finds none."""
    report = tmp_path / "report.json"
    platforms = [
        word for tag in ("manylinux2014", "manylinux_2_28") for word in ("--platform", f"{tag}_{machine}")
    ]
    words = ["install", "--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", *platforms]
    words += [
        "--python-version",
        python,
        "--implementation",
        "cp",
        "--target",
        str(tmp_path),
        "--report",
        str(report),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, *requirements], capture_output=True, text=True, check=False
    )
    if done.returncode:
        if "No matching distribution" not in done.stderr:
            pytest.skip(f"pip cannot ask the index: {done.stderr[-300:]}")
        return None
    found = json.loads(report.read_text("utf-8"))["install"]
    return {one["metadata"]["name"].lower(): one["download_info"]["url"].rpartition("/")[2] for one in found}


def makefile_pins(python):
    """Return what the Makefile calls the oldest libraries for a Python, by name."""
    text = (ROOT / "Makefile").read_text("utf-8")
    line = re.search(rf"^OLDEST_{re.escape(python)} := (.*)$", text, re.MULTILINE)
    assert line is not None
    shared = re.search(r"^OLDEST := (.*)$", text, re.MULTILINE).group(1)
    return dict(word.split("==") for word in line.group(1).replace("$(OLDEST)", shared).split())


def test_the_oldest_libraries_of_the_makefile_are_the_floors_of_the_project():
    floors = dict(one.split(">=") for one in dependencies("dev") if ">=" in one)
    pins = makefile_pins("3.10")
    assert pins.keys() >= {"numpy", "omegaconf", "pandas", "wrapt", "safetensors"}
    assert not [name for name in pins if Version(pins[name]) not in SpecifierSet(f"=={floors[name]}.*")]
    for python in PYTHONS[1:]:
        newer = makefile_pins(python)
        assert newer.keys() == pins.keys()
        assert not [name for name in pins if Version(newer[name]) < Version(pins[name])]


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS)
def test_wheels_for_aarch64(python, tmp_path):
    files = resolved(dependencies("report"), python, tmp_path)
    assert files is not None
    assert files.keys() >= COMPILED | {"omegaconf", "packaging", "rich", "jinja2"}
    tags = {name: file.removesuffix(".whl").rpartition("-")[2] for name, file in files.items()}
    assert {name: tag for name, tag in tags.items() if tag != "any" and "aarch64" not in tag} == {}
    assert {name for name, tag in tags.items() if "aarch64" in tag} >= COMPILED


@pytest.mark.long
def test_the_oldest_that_is_allowed_has_them_too(tmp_path):
    """OmegaConf 2.3.0 is pure Python; its antlr4-python3-runtime has no wheel for any machine."""
    floors = [
        one.replace(">=", "==") for one in dependencies() if one.partition(">")[0] in COMPILED - {"pyyaml"}
    ]
    assert len(floors) == 3
    assert resolved(floors, "3.10", tmp_path) is not None


@pytest.mark.long
def test_a_machine_without_wheels_is_seen(tmp_path):
    assert resolved(["numpy>=1.26"], "3.10", tmp_path, machine="nowhere") is None
