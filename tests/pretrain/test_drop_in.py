"""The drop-in: off it is the original, on it records; in every generation of Megatron's pretrain."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

from mindspeed_precision.arguments import requested
from mindspeed_precision.errors import PrecisionError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_only_the_flag_itself_turns_debugging_on():
    assert requested(["--lr", "1"]) is None
    assert requested(["--precision-debug-out", "x"]) is None
    request = requested(
        [
            *("--lr", "1", "--precision-debug", "--precision-debug-out", "runs/a"),
            *("--precision-debug-set", "capture.level=tensor", "steps=0-3", "--bf16"),
            *("--precision-debug-config", "quick"),
        ]
    )
    assert request is not None
    assert (str(request.out), request.config) == ("runs/a", "quick")
    assert request.overrides == ("capture.level=tensor", "steps=0-3")


def test_without_a_real_pretrain_the_error_says_what_to_do(monkeypatch):
    from mindspeed_precision.pretrain import resolve

    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron", "mindspeed_llm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(PrecisionError, match=r"no pretrain to stand in for.*wrap"):
        resolve()


@pytest.mark.parametrize(
    ("loaded", "home"),
    [
        # what a script whose one import is swapped has loaded by then, read in the branches of these projects
        ("mindspeed_llm.tasks.megatron_adaptor", "mindspeed_llm.training.training"),  # 1.0 to 2.1
        ("mindspeed_llm.tasks.megatron_adaptor_v2", "mindspeed_llm.training.training"),  # 2.2 and later
        ("mindspeed_mm.configs.config", "mindspeed_mm.training"),  # with MindSpeed's own adaptor
        ("mindspeed_ms.training", "mindspeed_ms.training"),
        ("megatron.training", "megatron.training"),
        ("mindspeed.megatron_adaptor", "megatron.training"),  # MindSpeed alone has no loop
    ],
)
def test_the_loop_of_the_loaded_framework_is_the_one_that_runs(monkeypatch, loaded, home):
    """Modules of those names stand in for what is not on PyPI."""
    from types import ModuleType, SimpleNamespace

    from mindspeed_precision.pretrain import resolve

    frameworks = ("megatron", "mindspeed", "mindspeed_llm", "mindspeed_mm", "mindspeed_ms")
    for name in [name for name in sys.modules if name.partition(".")[0] in frameworks]:
        monkeypatch.delitem(sys.modules, name)
    for path in (loaded, "megatron.training"):
        for depth in range(path.count(".") + 1):
            name = ".".join(path.split(".")[: depth + 1])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def import_module(name):
        return SimpleNamespace(pretrain=name)

    drop_in = sys.modules["mindspeed_precision.pretrain"]  # the package's attribute is the function
    monkeypatch.setattr(drop_in, "importlib", SimpleNamespace(import_module=import_module))
    assert resolve() == home


def test_wrap_runs_a_pretrain_of_ones_own():
    from mindspeed_precision import wrap

    assert wrap(lambda *args, **kwargs: (args, kwargs))(1, two=2) == ((1,), {"two": 2})


def test_it_has_the_signature_of_the_function_that_runs(monkeypatch):
    """nvidia-resiliency-ext looks in it for the argument to give its CallWrapper to: a class, no text."""
    from mindspeed_precision import pretrain, wrap

    def real(data, call_wrapper: Path | None = None):
        """Train."""

    drop_in = sys.modules["mindspeed_precision.pretrain"]
    monkeypatch.setattr(drop_in, "resolve", lambda: real)
    assert (
        inspect.signature(pretrain)
        == inspect.signature(wrap(real))
        == inspect.Signature(
            [
                inspect.Parameter("data", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                inspect.Parameter(
                    "call_wrapper",
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=None,
                    annotation="Path | None",  # this file's annotations are text
                ),
            ]
        )
    )
    assert pretrain.__name__ == "pretrain"


def test_where_nothing_runs_its_signature_is_its_own(monkeypatch):
    from mindspeed_precision import pretrain

    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron", "mindspeed_llm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    assert list(inspect.signature(pretrain).parameters) == ["args", "kwargs"]


def test_what_stands_in_the_way_of_a_session_is_one_message_and_status_2(monkeypatch, tmp_path, capsys):
    from mindspeed_precision import wrap
    from mindspeed_precision.errors import PatchError
    from mindspeed_precision.session import Session

    def refuse(self):
        raise PatchError("no patch was applied", remedy="mend it")

    monkeypatch.setattr(Session, "__enter__", refuse)
    out = str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["train.py", "--precision-debug", "--precision-debug-out", out])
    with pytest.raises(SystemExit) as caught:
        wrap(lambda: pytest.fail("it trained"))()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "mindspeed-precision: no patch was applied; mend it\n"


def run_script(megatron: Path, *arguments: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{megatron}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(HERE / "scripts" / "scan_when_off.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.torch
@pytest.mark.megatron
def test_without_the_flag_it_is_the_original_function_and_nothing_is_changed(megatron):
    answer = run_script(megatron("0.17.1"))
    assert answer == {
        "same_object": True,
        "same_arguments": True,
        "changed": [],
        "import_hooks": False,
        "heavy": [],
    }


@pytest.mark.torch
@pytest.mark.megatron
def test_the_scan_sees_a_patch(megatron):
    answer = run_script(megatron("0.17.1"), "--break-it")
    assert "megatron.training.training.train_step" in answer["changed"]


def train(
    version: str, megatron, tmp_path: Path, *flags: str, script=None, start=preloaded.run_training, **options
):
    from mindspeed_precision.testing.demo.arguments import demo_arguments
    from mindspeed_precision.testing.demo.launch import SCRIPT

    options = {"iterations": 2, "global_batch_size": 4, "dropout": 0.0, **options}
    return start(
        script or SCRIPT,
        [*demo_arguments(**options), *flags],
        processes=options.get("tp", 1) * options.get("pp", 1),
        megatron=megatron(version),
        log=tmp_path / "log",
    )


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.matrix
@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_each_generation_of_pretrain_is_recorded_in_full(version, megatron, tmp_path):
    from mindspeed_precision import compare_runs, load_run
    from mindspeed_precision.records import NO_MICROBATCH, Phase, Role
    from mindspeed_precision.testing.demo.launch import run_training

    plain = train(version, megatron, tmp_path / "plain")
    out = tmp_path / "run"
    flags = ["--precision-debug", "--precision-debug-out", str(out)]
    seen = train(version, megatron, tmp_path, *flags, start=run_training)  # as a user starts it
    assert seen.rows == plain.rows
    run = load_run(out)
    rank = run.ranks[0]
    assert (run.notes, rank.complete, rank.steps) == ((), True, (-1, 0, 1))
    assert run.manifest["findings"] == []
    assert run.manifest["versions"]["megatron.core"].partition("+")[0] == version
    assert {record.key.phase for record in rank.records} == set(Phase)
    assert rank.microbatches[0] == 2
    printed = [r for r in rank.records if r.key.phase is Phase.LOSS and r.key.microbatch == NO_MICROBATCH]
    assert [f"{record.value:.6E}" for record in printed][:1] == [seen.rows[0].loss]
    assert len(printed) == 2
    norms = [r.value for r in rank.records if r.key.role is Role.GRAD_NORM and r.key.slot == ""]
    assert len(norms) == 2
    ids = [r for r in rank.records if r.key.slot == "sample_ids"]
    assert [(r.key.step, r.key.microbatch) for r in ids] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    called = {line["name"]: line["calls"] for line in run.manifest["patches"]}
    assert called["train_step"] == 2
    assert called["setup"] == called["train"] == 1
    assert called["linear_backward"] > 0
    assert compare_runs(run, run).status.value == "identical"


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.matrix
@pytest.mark.parametrize("version", ["0.12.1", "0.16.1"])
def test_core_alone_is_recorded_in_full_by_a_session(version, megatron, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{megatron(version)}",
        "OMP_NUM_THREADS": "1",
    }
    script = HERE / "scripts" / "record_core.py"
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    from mindspeed_precision import load_run

    run = load_run(tmp_path / "run")
    assert run.manifest["versions"]["megatron.core"].partition("+")[0] == version
    assert (run.notes, run.manifest["findings"]) == ((), [])
    assert run.ranks[0].steps == (-1, 0, 1)


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.matrix
def test_bad_settings_are_one_line_and_status_2_before_training_starts(megatron, tmp_path):
    from mindspeed_precision.errors import ExternalCommandError

    with pytest.raises(ExternalCommandError) as caught:
        train("0.17.1", megatron, tmp_path, "--precision-debug", "--precision-debug-set", "capture.levl=1")
    text = (tmp_path / "log").read_text()
    assert "mindspeed-precision: capture.levl: Key 'levl' not in" in text
    assert "Traceback" not in text.partition("mindspeed-precision: ")[0]
    assert (caught.value.found, caught.value.where) == ("exit status 2", "pretrain_gpt.py")


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.matrix
def test_an_existing_run_is_not_overwritten(megatron, tmp_path):
    from mindspeed_precision.errors import ExternalCommandError

    out = tmp_path / "run"
    out.mkdir()
    (out / "precious").write_text("kept")
    with pytest.raises(ExternalCommandError, match=r"not empty|exists"):
        train("0.17.1", megatron, tmp_path, "--precision-debug", "--precision-debug-out", str(out))
    assert [path.name for path in out.iterdir()] == ["precious"]


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.matrix
@pytest.mark.parametrize("script", [None, HERE / "scripts" / "evaluate_with_dropout.py"])
def test_an_evaluation_between_steps_draws_nothing_unless_dropout_is_on_in_it(script, megatron, tmp_path):
    """Megatron's own loop, with an evaluation after every step."""
    from mindspeed_precision import check_run

    out = tmp_path / "run"
    flags = ["--precision-debug", "--precision-debug-out", str(out)]
    evaluated = ["--eval-interval", "1", "--eval-iters", "1"]
    settings = ["--precision-debug-set", "capture.modules=false", "capture.wgrad=false"]
    train("0.17.1", megatron, tmp_path, *evaluated, *flags, *settings, script=script, dropout=0.1)
    answer = check_run(out)
    outcome = next(one for one in answer.outcomes if one.name == "rng.moved_between_steps")
    assert outcome.exercised == 1
    found = [finding for finding in answer.findings if finding.id == "rng.moved_between_steps"]
    assert bool(found) is (script is not None)
