"""What the documents say is so: commands exist, flags are the real ones, links lead somewhere."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.arguments import add_flags
from mindspeed_precision.determinism.environment import ENVIRONMENT, RECORDED

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh.md")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("patches/*.md")]
)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def shell_lines(document: str) -> list[str]:
    return [
        line for kind, body in FENCE.findall(text(document)) if kind == "bash" for line in body.splitlines()
    ]


def broken_links(document: str, markdown: str) -> list[str]:
    """Return the links of ``markdown`` that lead to no file or heading of the repository."""
    broken = []
    for link in LINK.findall(FENCE.sub("", markdown)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (ROOT / document).parent / target if target else ROOT / document
        headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE) if file.is_file() else []
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if not file.exists() or (anchor and anchor not in anchors):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document):
    assert broken_links(document, text(document)) == []


def test_a_broken_link_is_noticed():
    assert broken_links("README.md", "[a](docs/no_such.md) [b](README.md#no-such) [c](README.md#limits)") == [
        "docs/no_such.md",
        "README.md#no-such",
    ]


def test_every_page_is_in_the_index():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.md")} - {
        "index.md"
    }
    assert pages <= set(LINK.findall(text("docs/index.md")))


def commands_of(document: str) -> set[str]:
    return {
        match.group(1)
        for line in shell_lines(document)
        if (match := re.match(r"(?:\S+/)?mindspeed-precision (\S+)", line))
    }


@pytest.mark.parametrize("command", sorted(set().union(*map(commands_of, READMES))))
def test_command_of_the_readme_exists(command):
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_precision", command, "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", READMES)
def test_make_targets_and_launch_scripts_of_the_readme_exist(document):
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text(document), re.MULTILINE))
    assert {"demo", "test"} <= targets
    subprocess.run(["make", "-n", *sorted(targets)], cwd=ROOT, check=True, capture_output=True)
    scripts = set(re.findall(r"\blaunch/\w+\.sh", text(document)))
    assert {f"launch/{path.name}" for path in (ROOT / "launch").iterdir()} >= scripts
    assert len(scripts) >= 4


def test_an_unknown_make_target_is_noticed():
    assert (
        subprocess.run(["make", "-n", "no-such"], cwd=ROOT, check=False, capture_output=True).returncode != 0
    )


@pytest.mark.parametrize("document", READMES)
def test_table_of_flags_is_that_of_the_parser(document):
    options = {
        option
        for action in add_flags(argparse.ArgumentParser(add_help=False))._actions
        for option in action.option_strings
    }
    assert set(re.findall(r"^\| `(--[a-z-]+)` \|", text(document), re.MULTILINE)) == options


@pytest.mark.parametrize("document", READMES)
def test_presets_of_the_readme_exist(document):
    (row,) = re.findall(r"^\| `--precision-debug-config` \|(.*)$", text(document), re.MULTILINE)
    presets = {path.stem for path in (ROOT / "configs" / "presets").glob("*.yaml")}
    assert set(re.findall(r"`([a-z-]+)`", row)) == presets


def test_the_readmes_tell_the_same():
    english, chinese = map(shell_lines, READMES)
    assert english == chinese
    count = [len(re.findall(r"^#+ ", text(document), re.MULTILINE)) for document in READMES]
    assert count[0] == count[1]


def test_table_of_variables_is_that_of_the_code():
    rows = re.findall(r"^\| `([A-Z][A-Z_0-9]+)` \| (.*) \|$", text("docs/determinism.md"), re.MULTILINE)
    pinned = {
        row.name: f"`{row.value}` | {', '.join(row.devices)} | {row.until.value}" for row in ENVIRONMENT
    }
    assert [name for name, _ in rows] == [*pinned, *RECORDED]
    for name, rest in rows:
        assert rest.startswith(pinned.get(name, RECORDED.get(name, "")))
