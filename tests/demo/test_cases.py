"""The worked cases: each gives the documented answer, and docs/cases.md quotes what it says."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from quotations import Latitude, unknown_lines

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.testing.demo import cases_at_start, cases_over_time, command
from mindspeed_precision.testing.demo.acts import Ask, Logs, Train, Training
from mindspeed_precision.testing.demo.answers import differences
from mindspeed_precision.testing.demo.case import Case
from mindspeed_precision.testing.demo.defects import gelu_kernels, scatter_kernels, weight_conversion
from mindspeed_precision.testing.demo.forked import ForkedTrainings
from mindspeed_precision.testing.demo.launch import SCRIPT, CompletedRun, LogRow
from mindspeed_precision.testing.demo.telling import log_table

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
TOLD = [*vars(cases_at_start).values(), *vars(cases_over_time).values()]
CASES = {case.name: case for case in TOLD if isinstance(case, Case)}
DOCUMENTED = ("docs/cases.md", "docs/cases.zh.md")

# What docs/cases.md says, apart from how the cases check themselves: report, what its JSON holds.
ANSWERS = {
    "config": [
        ("preflight", "warning", "config.repeated_argument", None),
        ("verify", "error", "optimizer.beta", None),
        ("verify", "error", "config.differs", None),
        ("compare", "error", "optimizer.beta", (0, "optimizer", None)),
        ("compare-repaired", None, None, "identical"),
    ],
    "data-order": [
        ("verify", "error", "data.batch_order", None),
        ("compare", "error", "data.batch_order", (0, "batch", None)),
        ("compare-repaired", None, None, "identical"),
    ],
    "structure": [
        ("compare", "error", "fprop.value", (0, "fprop", "decoder.layers.0.input_layernorm")),
        ("verify", "error", "model.module_differs", None),
        ("check", "error", "config.not_in_effect", None),
        ("compare-repaired", None, None, "identical"),
    ],
    "nondeterminism": [
        ("certify", "error", "determinism.operation", None),
        ("certify-repaired", None, None, "certified"),
    ],
    "first-loss": [
        (
            "compare",
            "error",
            "weights.initial_differs",
            (-1, "init", "decoder.layers.0.self_attention.linear_qkv.weight"),
        ),
        ("verify", "error", "weights.permuted", None),
        ("compare-repaired", None, None, "identical"),
    ],
    "drift": [
        ("compare", None, None, "within_tolerance"),
        ("compare-forced", "error", "wgrad.value", (6, "wgrad", "embedding.word_embeddings.weight")),
        ("compare-repaired", None, None, "within_tolerance"),
    ],
    "nan": [
        ("check", "error", "nonfinite.first", None),
        ("compare", "error", "fprop.value", None),
        ("compare", "error", "nonfinite.first", (0, "fprop", "decoder.layers.0.mlp.linear_fc2")),
        ("compare-repaired", None, None, "identical"),
    ],
}

LATITUDES = {
    "nondeterminism": Latitude(counts=False),  # how many records are equal, threads decide anew each time
    "drift": Latitude(relative=0.1),  # seventy steps make much of a rounding
}


def test_every_case_is_listed_told_and_documented():
    for name, entry in command.CASES.items():
        told = getattr(importlib.import_module(entry.module), entry.function)
        assert callable(told)
        assert getattr(told, "name", name) == name
        assert f"{name} " in command.listing()
        assert entry.about in command.listing()
    assert CASES.keys() == ANSWERS.keys() <= command.CASES.keys()
    for document in DOCUMENTED:
        text = (ROOT / document).read_text(encoding="utf-8")
        assert [name for name in [*CASES, "glm4"] if f"demo {name}" not in text] == [], document


def test_a_case_asks_after_it_trained():
    for case in CASES.values():
        trained: set[str] = set()
        for act in case.acts:
            if isinstance(act, Train):
                trained |= {training.name for training in act.trainings}
            elif isinstance(act, Ask):
                assert set(re.findall(r"@(?:launch:)?([a-z-]+)", act.command)) <= trained
            elif isinstance(act, Logs):
                assert {act.baseline, act.candidate} <= trained


@pytest.mark.parametrize(
    ("expected", "found", "wrong"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": 1}, {"b": 1}, ["a is None, documented is 1"]),
        ({"a": {"b": [1, 3]}}, {"a": {"b": [0, 1, 2, 3]}}, []),
        ([3, 1], [1, 3], ["answer has no 1 ([1] is 3, documented is 1)"]),
        ([], [1], ["answer is [1], documented is []"]),
        ([1], [], ["answer is [], documented is [1]"]),
        ({"a": {"b": 1}}, {"a": None}, ["a is None, documented is {'b': 1}"]),
        ([{"id": "x", "severity": "error"}], [{"id": "x", "severity": "warning"}], None),
    ],
)
def test_an_answer_that_is_not_the_documented_one_is_noticed(expected, found, wrong):
    said = differences(expected, found)
    assert said if wrong is None else said == wrong


def rows(*losses: str) -> CompletedRun:
    log = tuple(LogRow(iteration=n + 1, loss=loss, grad_norm="1.0") for n, loss in enumerate(losses))
    return CompletedRun(returncode=0, log=Path(), rows=log)


def test_the_table_marks_what_differs_and_shows_a_loss_that_is_not_there():
    table = log_table(rows("5.0", "4.0", "3.0"), rows("5.0", "4.1", ""), names=("one", "two")).splitlines()
    assert table[0].split() == [
        "step",
        "loss",
        "one",
        "loss",
        "two",
        "grad",
        "norm",
        "one",
        "grad",
        "norm",
        "two",
    ]
    assert ["←" in line for line in table[1:]] == [False, True, True]
    assert table[3].split()[:3] == ["2", "3.0", "-"]
    assert len({len(line.split("   ←")[0]) for line in table}) == 1


def test_the_table_leaves_out_what_is_healthy():
    table = log_table(rows("5.0", "4.0", "3.0"), rows("5.000001", "4.1", "3.0"), above=1e-3).splitlines()
    assert ["←" in line for line in table[1:]] == [False, True, False]
    assert len(log_table(rows("5.0", "4.0", "3.0"), rows("5.0", "4.0", "3.0"), every=2).splitlines()) == 3


class TestDefects:
    """The kernels of the cases do what they say, and their right variants are right."""

    def test_a_conversion_there_and_back_is_none(self):
        qkv = torch.arange(24.0).reshape(24, 1)
        parts = weight_conversion.to_hugging_face(qkv, 4)
        assert torch.equal(weight_conversion.from_hugging_face(parts, 4, by_head=True), qkv)
        wrong = weight_conversion.from_hugging_face(parts, 4, by_head=False)
        assert not torch.equal(wrong, qkv)
        assert torch.equal(wrong.sort(dim=0).values, qkv)

    def test_the_three_activations_are_one_function(self):
        x = torch.linspace(-6, 6, 100)
        assert torch.allclose(gelu_kernels.by_sigmoid(x), gelu_kernels.by_exp(x), rtol=1e-5)
        assert torch.allclose(gelu_kernels.by_sigmoid(x), gelu_kernels.by_exp_in_half(x), atol=1e-2)

    @pytest.mark.parametrize(("at", "broken"), [(-6.4, False), (-6.6, True)])
    def test_float16_ends_in_the_gradient_first(self, at, broken):
        x = torch.tensor([at], requires_grad=True)
        result = gelu_kernels.by_exp_in_half(x)
        result.backward()
        assert result.isfinite().all()
        assert bool(x.grad.isnan().any()) is broken
        y = torch.tensor([at], requires_grad=True)
        gelu_kernels.by_exp(y).backward()
        assert y.grad.isfinite().all()

    @pytest.mark.parametrize("positions", [scatter_kernels.in_order, scatter_kernels.as_they_finish])
    def test_a_scatter_is_the_gradient_of_the_look_up(self, positions):
        weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
        indices = torch.tensor([[1, 2, 1], [1, 6, 2]])
        given = torch.randn(2, 3, 3, dtype=torch.float64)
        scatter_kernels.Embedding.apply(indices, weight, positions).backward(given)
        ours, weight.grad = weight.grad, None
        torch.nn.functional.embedding(indices, weight).backward(given)
        assert torch.allclose(ours, weight.grad)

    def test_a_row_with_more_than_twelve_tokens_is_forgotten(self):
        indices = torch.tensor([0] * 12 + [1] * 13)
        assert scatter_kernels.into_slots(indices).tolist() == list(range(12))

    @pytest.mark.parametrize("words", [[], ["no-such", str(SCRIPT)], ["exp"], ["exp", "no_such.py"]])
    def test_a_variant_that_there_is_not_is_refused(self, monkeypatch, capsys, words):
        monkeypatch.setattr(sys, "argv", ["gelu_kernels.py", *words])
        from mindspeed_precision.testing.demo.defects.behind import run_behind

        with pytest.raises(SystemExit, match="2"):
            run_behind(gelu_kernels.VARIANTS)
        assert "usage: gelu_kernels.py sigmoid|exp|exp-fp16 SCRIPT" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trainings(megatron):
    """Return one server for the trainings of all cases: its imports take longer than they."""
    with pytest.MonkeyPatch.context() as patch, ForkedTrainings() as forked:
        patch.setenv("PYTHONPATH", str(megatron("0.17.1")))
        yield forked


@pytest.mark.megatron
@pytest.mark.matrix
class TestCases:
    """Each case as `demo CASE` tells it."""

    @pytest.mark.parametrize("name", CASES)
    def test_the_documented_answer_is_given(self, trainings, tmp_path, capsys, monkeypatch, name):
        monkeypatch.setenv("COLUMNS", "200")  # lines are as wide as they may be: a quote has them whole
        directory = tmp_path / f"demo-{name}"
        shown = CASES[name](directory, trainings)
        text = capsys.readouterr().out
        assert shown, text
        found = command.DemoResult(status=0, directory=directory).verdicts()
        assert found.keys() == {f"reports/{report}" for report, *_ in ANSWERS[name]}
        for report, severity, finding, rest in ANSWERS[name]:
            holds(found[f"reports/{report}"], severity, finding, rest)
        for document in DOCUMENTED:
            assert unknown_lines(quoted(document, name), text, LATITUDES.get(name, Latitude())) == [], (
                document
            )

    def test_a_healthy_candidate_does_not_give_the_answer(self, trainings, tmp_path, capsys):
        case = CASES["structure"]
        kernels = (("norm_modules.py", "handed-on"),)
        healthy = Train(*(Training(name=name, kernels=kernels) for name in ("baseline", "candidate")))
        until = next(n for n, act in enumerate(case.acts) if isinstance(act, Ask)) + 1
        acts = tuple(healthy if isinstance(act, Train) else act for act in case.acts[:until])
        assert not dataclasses.replace(case, acts=acts)(tmp_path, trainings)
        said = capsys.readouterr().out
        assert "compare: status is 'identical', documented is 'diverged'" in said
        assert "compare: exit status 0, documented is 1" in said

    def test_a_training_that_fails_is_one_clear_error(self, trainings, tmp_path):
        with pytest.raises(ExternalCommandError, match="unrecognized arguments: --no-such-argument"):
            trainings.run([str(SCRIPT), "--no-such-argument"], log=tmp_path / "log")
        log = tmp_path / "log-again"
        with pytest.raises(ExternalCommandError, match="exit status 2"):  # the server is still there
            trainings.run([str(SCRIPT), "--no-such-argument"], log=log)

    def test_a_rank_that_fails_ends_the_others(self, trainings, tmp_path):
        script = tmp_path / "ranks.py"
        script.write_text(
            "import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n"
        )
        with pytest.raises(ExternalCommandError, match="exit status 3"):
            trainings.run([str(script)], processes=2, log=tmp_path / "log", timeout=40)

    def test_a_server_that_was_killed_is_started_again(self, trainings, tmp_path):
        script = tmp_path / "ok.py"
        script.write_text("print('here')\n")
        for _ in range(2):
            assert "here" in trainings.run([str(script)], log=tmp_path / "log").text
            trainings._server.kill()
            trainings._server.wait()

    def test_a_machine_without_megatron_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with ForkedTrainings() as forked, pytest.raises(ExternalCommandError, match=r"megatron.*make demo"):
            forked.run([str(SCRIPT)], log=tmp_path / "log")

    def test_the_command_prints_its_answers(self, megatron, tmp_path):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{megatron('0.17.1')}"}
        words = [
            sys.executable,
            "-m",
            "mindspeed_precision",
            "demo",
            "data-order",
            "--out",
            str(tmp_path / "out"),
            "--json",
        ]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout).keys() == {f"reports/{report}" for report, *_ in ANSWERS["data-order"]}
        assert "gave the answer that docs/cases.md documents" in done.stderr


def holds(answer, severity, finding, rest):
    """Hold one answer against one line of ``ANSWERS``."""
    if finding is None:
        assert answer["findings"] == []
        if rest != "certified":
            assert answer["status"] == rest
        return
    assert (finding, severity) in {(one["id"], one["severity"]) for one in answer["findings"]}
    if rest is not None:
        step, phase, fqn = rest
        first = answer["first_divergence"]
        assert (first["step"], first["phase"], first["origin"]) == (step, phase, True)
        assert fqn in (None, first["fqn"])
        assert answer["findings"][0]["id"] == finding


def quoted(document: str, name: str) -> list[str]:
    """Return the lines of output that a document quotes in the section of a case."""
    text = (ROOT / document).read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    (section,) = [one for one in sections if f"demo {name}\n" in one]
    blocks = re.findall(r"^```text\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert blocks, f"{document} quotes nothing of {name}"
    return [line for block in blocks for line in block.splitlines() if line.strip() not in ("", "…")]
