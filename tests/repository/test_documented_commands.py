"""Every command of README.md and docs/*.md runs: on recorded runs, as a dry run; or it says why not."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mindspeed_precision.arguments import add_flags
from mindspeed_precision.certify.launching import Launching
from mindspeed_precision.cli import build_parser, main
from mindspeed_precision.cli_launch import split_launch
from mindspeed_precision.config import load_settings
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.command import CASES

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md")]
)
TRANSLATED = [name for name in DOCUMENTS if name.endswith(".zh.md")]
ENGLISH = [name for name in DOCUMENTS if name not in TRANSLATED]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"([A-Z_]+=\S+ )*(mindspeed-precision|launch/|make |python -m mindspeed_precision)|export ")
PROGRAM = "mindspeed-precision"
ANSWERED: dict[str, str] = {}
"""What commands that write nothing came to: several documents have the same ones."""


def commands_in(markdown: str) -> list[str]:
    """Return the commands of ``bash`` blocks, and those of this project in blocks without a language.

    Continued lines are joined, comments are left out.
    """
    found = []
    for _, language, body in BLOCK.findall(markdown):
        lines = textwrap.dedent(body).replace("\\\n", " ").splitlines()
        if language == "bash":
            found += [line for line in lines if shlex.split(line, comments=True)]
        elif not language:
            found += [line for line in lines if OURS.match(line)]
    return [line.split(" #")[0].strip() for line in found]


def commands_of(document: str) -> list[str]:
    return commands_in((ROOT / document).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def declared():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(Path(__file__).with_name("documented_commands.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorded(cpu_megatron, tmp_path_factory):
    """Record four real trainings, small ones; return their directory."""
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    out = tmp_path_factory.mktemp("recorded")
    small = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "microbatches": 1}
    preset = ROOT / "configs" / "presets" / "reference.yaml"
    for name, changed, overrides in (
        ("baseline", {}, ()),
        ("repeat", {}, ()),
        ("candidate", {"lr": 2e-3}, ()),
        ("noise", {}, (f"init_from={out / 'baseline'}", "perturb.epsilon=auto")),
    ):
        record_training(
            TrainerSettings(**{**small, **changed}), out / name, config=preset, overrides=overrides
        )
    return out


@pytest.fixture
def place(recorded, declared, tmp_path, monkeypatch):
    """Go to a directory in which the documents' runs and the repository's files are where they say."""
    (tmp_path / "runs").mkdir()
    for run, names in declared["runs"].items():
        for name in names:
            (tmp_path / "runs" / name).symlink_to(recorded / run)
    for name, content in declared["files"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    for name in ("configs", "launch", "patches", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "stand_ins").mkdir()
    for name in (
        "torchrun",
        "msrun",
    ):  # where a launch script has no dry run it prints here what it would start
        stand_in = tmp_path / "stand_ins" / name
        stand_in.write_text(f'#!/bin/sh\necho {name} "$@"\n', encoding="utf-8")
        stand_in.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Runner:
    """Runs a documented command, or says what is wrong with it.

    Args:
        declared: the table of ``documented_commands.yaml``.
    """

    def __init__(self, declared) -> None:
        self.declared = declared
        self.exported: dict[str, str] = {}
        self.environment: dict[str, str] = {}

    def problem(self, command: str) -> str:
        """Run a command; return what is wrong, or nothing."""
        if command in ANSWERED:
            return ANSWERED[command]
        try:
            wrong = self._problem(command)
        except PrecisionError as error:
            wrong = str(error)
        if not re.search(r" --(out|refine) ", command):
            ANSWERED[command] = wrong
        return wrong

    def _problem(self, command):
        words = ["$ARGS" if word == "…" else word for word in shlex.split(command.removesuffix(" ..."))]
        given = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        if words[:1] == ["export"]:
            self.exported |= dict(word.split("=", 1) for word in words[1:] if "=" in word)
        self.environment = {**os.environ, "PYTHON": sys.executable, **self.exported, **given}
        if not words or words[0] in self.declared["others"]:
            return ""
        for form, run in (
            (rf"{PROGRAM}$", self._program),
            (r"\.\.\.$", self._flags),
            (r"launch/[\w/]+\.sh$", self._launch),
            (r"make$", self._make),
            (r"pip3?$", self._pip),
            (r"python3?$", self._python),
        ):
            if re.match(form, words[0]):
                return run(command, words[1:])
        return f"nobody knows how to run {words[0]}"

    def _program(self, command, words):
        try:
            arguments = build_parser().parse_args(split_launch(words)[0])
        except (SystemExit, PrecisionError):
            return "the parser refuses it"
        if any(command.startswith(beginning) for beginning in self.declared["not_here"]):
            return ""
        if arguments.command == "demo" and not arguments.list:
            return self._demo(arguments.case)
        words = [filled for word in words for filled in (demo_arguments() if word == "$ARGS" else [word])]
        own, launch = split_launch(words)
        if own[0] == "certify" and launch:
            return self._planned(arguments, launch)
        missing = [
            word for word in words if re.match(r"runs/", word) and not self._may_be_absent(words, word)
        ]
        if missing:
            return f"{missing[0]} is not declared in documented_commands.yaml"
        status = main(words)
        return f"exit status {status}" if status not in (0, 1) else ""

    @staticmethod
    def _may_be_absent(words, word):
        return Path(word).exists() or words[words.index(word) - 1] in ("--out", "--refine")

    def _demo(self, case):
        """A case runs in a test of its own."""
        if case not in CASES:
            return f"no such case: {case}"
        tests = "".join(
            path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "demo").glob("test_*.py")
        )
        return "" if f'"{case}"' in tests else f"no test runs the case {case}"

    def _planned(self, arguments, launch):
        launching = Launching(launch, out=Path("planned"), environment=dict(os.environ))
        at = arguments.resume_at
        runs = launching.resumed(at, arguments.steps) if at else launching.twice(arguments.steps)
        return "" if all("--precision-debug" in run.words for run in runs) else "the plan records nothing"

    def _flags(self, command, words):
        """Settings as Megatron's parser and ours take them."""
        parser = add_flags(argparse.ArgumentParser(add_help=False))
        given, rest = parser.parse_known_args([*words, "--precision-debug"])
        ours = [word for word in rest if word.startswith("--precision-debug")]
        if ours:
            return f"no such flag: {ours[0]}"
        load_settings(
            given.precision_debug_config, given.precision_debug_set or []
        )  # a preset, a file that is here
        return ""

    def _launch(self, command, words):
        words, into = (words[: words.index(">")], words[-1]) if ">" in words else (words, "")
        if wrong := self._flags(command, words):
            return wrong
        words = [filled for word in words for filled in (demo_arguments() if word == "$ARGS" else [word])]
        given = dict(word.split("=", 1) for word in shlex.split(command) if re.match(r"[A-Z_]+=", word))
        script = next(word for word in shlex.split(command) if word.endswith(".sh"))
        done = self._run(["bash", script, *words], **{**given, "MSP_DRY_RUN": "1"})
        if Path(script).stem in ("compare", "demo"):
            return "" if done.returncode in (0, 1) else done.stderr.strip()
        if done.returncode:
            return f"exit status {done.returncode}: {done.stderr.strip()}"
        if into:
            Path(into).write_text(done.stdout, encoding="utf-8")
        printed = set(shlex.split(done.stdout.replace("\\\n", " "), comments=True))
        lost = [word for word in words if word not in printed]
        return f"a dry run does not start it with {lost[0]}" if lost else ""

    def _run(self, words, **variables):
        """Start a command with what the document exported, and the stand-ins for launchers."""
        environment = {**self.environment, **variables, "PYTHONPATH": str(ROOT)}
        environment["PATH"] = f"{Path('stand_ins').absolute()}{os.pathsep}{environment['PATH']}"
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    def _make(self, command, words):
        if cases := [word.removeprefix("CASE=") for word in words if word.startswith("CASE=")]:
            return self._demo(cases[-1])
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stderr.strip() if done.returncode else ""

    def _pip(self, command, words):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        extras = re.findall(r"\[([\w,]+)\]", " ".join(words))
        lost = [name for group in extras for name in group.split(",") if f"\n{name} = [" not in text]
        return f"no such extra: {lost[0]}" if lost else ""

    def _python(self, command, words):
        if any(command.startswith(beginning) for beginning in self.declared["not_here"]):
            return ""
        module = words[1] if words[:1] == ["-m"] and len(words) > 1 else ""
        if not module.startswith("mindspeed_precision"):
            return f"not of this project: {command}"
        if module == "mindspeed_precision":
            return self._program(command, words[2:])
        done = self._run([sys.executable, *words])
        answered = done.returncode == 0 or (done.returncode == 1 and done.stdout)
        return "" if answered and "Traceback" not in done.stderr else done.stderr.strip()


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.parametrize("document", [name for name in ENGLISH if commands_of(name)])
def test_every_command_runs(document, place, declared, capsys):
    runner = Runner(declared)
    problems = {command: runner.problem(command) for command in commands_of(document)}
    assert {command: wrong for command, wrong in problems.items() if wrong} == {}


@pytest.mark.parametrize("document", TRANSLATED)
def test_a_translation_has_the_same_commands(document):
    assert commands_of(document) == commands_of(document.replace(".zh.md", ".md"))


def test_what_is_declared_is_documented(declared):
    said = [command for document in ENGLISH for command in commands_of(document)]
    unused = [one for one in declared["not_here"] if not any(command.startswith(one) for command in said)]
    assert unused == []
    text = " ".join(said)
    names = [name for names in declared["runs"].values() for name in names]
    assert [name for name in names if f"runs/{name}" not in text] == []
    assert sorted(names) == sorted(set(names))


def test_commands_are_found():
    text = "a\n```bash\nmake x  # why\n# no\nlaunch/a.sh b \\\n  c\n```\n"
    text += "1. x\n\n   ```bash\n   make y\n   ```\n```\nmake z\nother\n```\n```text\nmake 0\n```\n"
    assert [" ".join(command.split()) for command in commands_in(text)] == [
        "make x",
        "launch/a.sh b c",
        "make y",
        "make z",
    ]


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("mindspeed-precision compare runs/mindspore runs/pta", ""),
        ("mindspeed-precision compare runs/mindspore runs/no-such-run", "not declared"),
        ("mindspeed-precision compare runs/mindspore", "parser refuses"),
        ("mindspeed-precision no-such-command", "parser refuses"),
        ("mindspeed-precision demo no-such-case", "no such case"),
        ("mindspeed-precision verify runs/mindspore runs/pta --mapping no_such.yaml", "exit status 2"),
        ("launch/gpu.sh pretrain_gpt.py $ARGS --precision-debug", ""),
        ("launch/no_such.sh pretrain_gpt.py", "exit status 127"),
        ("launch/gpu.sh pretrain_gpt.py --precision-debug --precision-debug-no-such", "no such flag"),
        ("... --precision-debug-config no_such.yaml", "no_such.yaml"),
        ("... --precision-debug-set no.such=1", "Key 'no' not in"),
        ("make no-such-target", "No rule"),
        ("make demo CASE=no-such-case", "no such case"),
        ("pip install -e '.[no_such]'", "no such extra"),
        ("python -m mindspeed_precision.no_such", "No module named"),
        ("curl example.org", "nobody knows"),
    ],
)
def test_a_command_that_does_not_run_is_noticed(command, wrong, place, declared, capsys):
    try:
        said = Runner(declared).problem(command)
    except SystemExit as end:
        said = f"exit status {end.code}"
    assert (wrong in said) if wrong else said == ""
