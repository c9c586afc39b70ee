"""Console text: golden files (``MSP_UPDATE_GOLDEN=1`` rewrites them), and its corners."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Level, Phase, RecordKey, Replay, ReplayRecipe, Role, Side
from mindspeed_precision.report.console import render, show
from mindspeed_precision.report.phrases import judgement
from mindspeed_precision.testing.fake_runs import (
    LINEAR,
    constant,
    nudged,
    plant,
    scaled,
    transposed_layout,
    write_fake_run,
)

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = plant(phase="wgrad", role="grad_output", fqn=LINEAR, layout=transposed_layout)

CASES = {
    "identical": ({}, {}),
    "layout": (
        {},
        {"plants": [plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=nudged(3)), LAYOUT]},
    ),
    "kernel": (
        {"payloads": f"{LINEAR}*"},
        {"plants": [plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, microbatch=0, value=nudged(3))]},
    ),
    "weight_decay": (
        {"ranks": 2},
        {"plants": [plant(role="hyperparameter", slot="weight_decay", fqn="*bias", value=constant(0))]},
    ),
    "frozen": ({}, {"frozen": frozenset([f"{LINEAR}.weight"])}),
    "two_faults": (
        {},
        {
            "plants": [
                plant(phase="dgrad", role="grad_input", fqn=LINEAR, step=0, microbatch=0, value=scaled(2)),
                plant(
                    role="hyperparameter", slot="weight_decay", fqn="output_layer.weight", value=constant(0)
                ),
            ],
        },
    ),
    "not_certified": ({"lr": 0.0}, {}),
}


def diagnosis_of(directory, name):
    shape, fault = CASES[name]
    one = write_fake_run(directory / "baseline", **shape)
    return compare_runs(one, write_fake_run(directory / "candidate", **{**shape, **fault}), replay=False)


@pytest.mark.parametrize("name", CASES)
def test_golden_text(name, tmp_path):
    files = {"verdict": "compare/verdict.json", "report": "compare/report.html"}
    text = render(diagnosis_of(tmp_path, name), files, width=100)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("MSP_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    # digits of a float depend on the CPU's BLAS: the words and the layout must not
    assert _without_digits(text) == _without_digits(path.read_text(encoding="utf-8"))


def _without_digits(text: str) -> str:
    counts = "more record|identical|diverged|missing|records? pass|undecided"
    text = re.sub(rf"\d+(?=\s+({counts}))", "#", text)
    return re.sub(r"\d+\.\d+(e[-+]\d+)?", "#", text)


def test_golden_comparison_can_fail():
    assert _without_digits("norm 1.5 at step 0") != _without_digits("norm 1.5 at step 1")


def test_first_line_says_verdict_and_place(tmp_path):
    first = render(diagnosis_of(tmp_path, "layout")).splitlines()[0]
    assert first.startswith("DIVERGED at step 0, microbatch 0, in the backward pass.")
    assert "Loss and grad norm still agree there" in first


@pytest.mark.parametrize("width", [40, 60, 110])
def test_prose_fits_the_terminal(width, tmp_path):
    diagnosis = diagnosis_of(tmp_path, "layout")
    lines = render(diagnosis, width=width).splitlines()
    words = [line for line in lines if not line.lstrip().startswith(("log", "0 ", "1 "))]
    assert max(map(len, words)) <= max(width, 60)


def test_a_terminal_gets_the_same_words(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    diagnosis = diagnosis_of(tmp_path, "two_faults")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    terminal, plain = Terminal(), io.StringIO()
    show(diagnosis, stream=terminal)
    show(diagnosis, stream=plain)
    assert "\x1b[" in terminal.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()) == plain.getvalue()


def test_markup_in_names_is_text(tmp_path):
    diagnosis = diagnosis_of(tmp_path, "identical")
    assert "[bold]" in render(replace(diagnosis, notes=("[bold]not markup[/bold]",)))


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (2.1e-4, 2.1e-4, "equally far from float64 (2.1e-04): neither is wrong"),
        (2.1e-4, 0.3, "suspect the candidate"),
        (0.3, 2.1e-4, "suspect the baseline"),
        (0.0, 0.0, "neither is wrong"),
    ],
)
def test_judgement_blames_the_side_that_is_far_from_float64(one, two, words):
    key = RecordKey(step=0, phase=Phase.WGRAD, fqn="m", role=Role.WGRAD)
    recipe = ReplayRecipe(
        recipe="r", baseline_mismatched=0, candidate_mismatched=1, recorded_for=(Side.BASELINE,)
    )
    replay = Replay(
        key=key,
        rank=0,
        elements=1,
        recipes=(recipe,),
        baseline_error=one,
        candidate_error=two,
        environment="",
        proved=True,
    )
    assert words in judgement(replay)


def test_levels_without_statistics_are_shown(tmp_path):
    one = write_fake_run(tmp_path / "a", level=Level.FINGERPRINT)
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, value=scaled(2))
    text = render(compare_runs(one, write_fake_run(tmp_path / "b", level=Level.FINGERPRINT, plants=[fault])))
    assert "bits differ" in text
    assert "Loss" not in text
