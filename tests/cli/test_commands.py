"""The commands from outside: exit statuses, and one line for every bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from mindspeed_precision.cli import build_parser, main
from mindspeed_precision.config import load_settings
from mindspeed_precision.records import Level
from mindspeed_precision.testing.fake_runs import LINEAR, nudged, plant, scaled, write_fake_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=scaled(2))
    write_fake_run(directory / "one")
    write_fake_run(directory / "two", plants=[fault])
    write_fake_run(directory / "wide", ranks=2)
    write_fake_run(directory / "idle", lr=0.0)
    index = write_fake_run(directory / "other") / "rank00000" / "index.jsonl"
    index.write_text(index.read_text().replace('"fqn":"embedding.', '"fqn":"other.'))
    (index.parent / "COMPLETE").unlink()
    return directory


def run(capsys, *argv):
    status = main([str(argument) for argument in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_equal_runs_are_0(runs, tmp_path, capsys):
    status, out, err = run(capsys, "compare", runs / "one", runs / "one", "--out", tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("IDENTICAL")


def test_different_runs_are_1_and_leave_a_report_beside_the_candidate(runs, capsys):
    status, out, err = run(capsys, "compare", runs / "one", runs / "two")
    assert (status, err) == (1, "")
    assert "wgrad.scaled" in out
    assert json.loads((runs / "compare" / "verdict.json").read_text())["status"] == "diverged"
    assert str(runs / "compare" / "verdict.json") in out


def test_json_is_the_verdict(runs, tmp_path, capsys):
    status, out, _ = run(
        capsys, "compare", runs / "one", runs / "two", "--json", "--no-replay", "--out", tmp_path
    )
    assert status == 1
    assert json.loads(out) == json.loads((tmp_path / "verdict.json").read_text())


def test_what_proves_nothing_is_2_and_says_so(runs, tmp_path, capsys):
    status, out, err = run(capsys, "compare", runs / "idle", runs / "idle", "--out", tmp_path)
    assert status == 2
    assert out.startswith("NOT CERTIFIED")
    assert err.count("\n") == 1
    assert "learning rate is zero" in err


def _truncated_index(run_directory):
    path = run_directory / "rank00000" / "index.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _truncated_payload(run_directory):
    path = next((run_directory / "rank00000").glob("step*.safetensors"))
    path.write_bytes(path.read_bytes()[:-40])


def _missing_payload(run_directory):
    next((run_directory / "rank00000").glob("step*.safetensors")).unlink()


def _other_schema(run_directory):
    path = run_directory / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))


def _not_json(run_directory):
    (run_directory / "run.json").write_text("{")


def _other_model(run_directory):
    path = run_directory / "rank00000" / "index.jsonl"
    path.write_text(
        path.read_text().replace(f'"fqn":"{LINEAR}.bias","shape"', '"fqn":"decoder.other","shape"')
    )
    (run_directory / "rank00000" / "COMPLETE").unlink()


SPOILED = {
    "truncated index": (_truncated_index, "index.jsonl"),
    "truncated payload": (_truncated_payload, "safetensors"),
    "missing payload": (_missing_payload, "safetensors"),
    "another schema": (_other_schema, "another schema"),
    "no JSON": (_not_json, "not readable as JSON"),
    "another model": (_other_model, "different models"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_run_is_one_line_and_2(name, runs, tmp_path, capsys):
    spoil, words = SPOILED[name]
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, value=scaled(2))
    one = write_fake_run(tmp_path / "one", level=Level.TENSOR)
    two = write_fake_run(tmp_path / "two", level=Level.TENSOR, plants=[fault])
    spoil(two)
    _one_line(run(capsys, "compare", one, two, "--out", tmp_path / "out"), words)


@pytest.mark.parametrize(
    ("baseline", "candidate", "more", "words"),
    [
        ("absent", "one", (), "no such run directory"),
        ("one", "absent", (), "no such run directory"),
        ("one/run.json", "one", (), "not a directory"),
        ("one", "empty", (), "not a run"),
        ("one", "other", (), "train different models"),
        ("one", "one", ("--policy", "strict"), "exact, huawei, msprobe, tolerance"),
        ("one", "one", ("--policy", "absent.yaml"), "no such policy"),
        ("one", "one", ("--out", "file/x"), "--out: not a directory (found"),
        ("one", "two", ("--out", "two"), "a report is not written into a run (found two, which is the"),
        ("one", "two", ("--out", "one/new/report"), "one/new/report, which is inside the run"),
        ("one", "two", ("--out", "wide/rank00000"), "wide/rank00000, which is inside the run"),
        ("one", "two", ("--calibrate", "empty", "--out", "empty/x"), "empty/x, which is inside the run"),
        ("one", "two", ("--refine", "absent/refine.yaml"), "no such directory"),
        ("one", "two", ("--refine", "one/run.json/refine.yaml"), "no such directory"),
        ("one", "two", ("--refine", "one"), "the file exists"),
    ],
)
def test_bad_input_is_one_line_and_2(baseline, candidate, more, words, runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    (runs / "empty").mkdir(exist_ok=True)
    (runs / "file").touch()
    before = sorted(runs.rglob("*"))
    _one_line(run(capsys, "compare", baseline, candidate, *more), words)
    assert sorted(runs.rglob("*")) == before


def test_where_the_report_goes_is_asked_before_the_work(runs, capsys, monkeypatch):
    def work(*_, **__):
        raise AssertionError("the runs were compared first")

    monkeypatch.setattr("mindspeed_precision.flow.compare_in_full", work)
    place = runs / "two" / "report"
    _one_line(run(capsys, "compare", runs / "one", runs / "two", "--out", place), "not written into a run")


REFUSED = (
    (("compare", "absent", "one"), "no such run directory"),
    (("compare", "one"), "the following arguments are required: CANDIDATE"),
    (("check", "absent"), "no such run directory"),
    (("verify", "absent", "one"), "no such run directory"),
    (("show", "absent"), "no such run directory"),
    (("show", "one", "--step", "x"), "argument --step: invalid int value: 'x'"),
    (("ckpt", "absent", "one"), "no such checkpoint"),
    (("data", "absent"), "no data that can be read"),
    (("evaluation", "absent", "one"), ""),
    (("export", "one"), "nothing to export to"),
    (("msprobe", "export", "absent", "--out", "dump"), "no such run directory"),
    (("msprobe", "config", "absent"), ""),
    (("certify",), "give runs, or a launch behind --"),
    (("shrink",), "no launch was given"),
    (("preflight", "--backend", "tpu"), ""),
    (("patches", "explain", "absent"), ""),
    (("demo", "absent"), ""),
)


@pytest.mark.parametrize(("argv", "what"), REFUSED, ids=[" ".join(argv) for argv, _ in REFUSED])
def test_with_json_an_error_is_an_object(argv, what, runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    status, out, err = run(capsys, *argv, "--json")
    told = json.loads(out)
    assert status == 2
    assert (told["schema"], told["command"]) == (1, argv[0])
    assert {"error", "what", "where", "found", "expected", "remedy"} < set(told)
    assert what in told["what"] != ""
    assert told["what"] in err
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert told["what"] in err


@pytest.mark.parametrize("word", ["--jso", "--js"])
@pytest.mark.parametrize("command", [("compare", "one", "two"), ("show", "one"), ("patches", "list")])
def test_an_option_is_written_in_full(command, word, runs, capsys, monkeypatch):
    """An abbreviation would not be seen where an error is to be an object."""
    monkeypatch.chdir(runs)
    assert run(capsys, *command, "--json")[0] in (0, 1)
    status, out, err = run(capsys, *command, word)
    assert (status, out) == (2, "")
    assert f"mindspeed-precision: unrecognized arguments: {word}; see" in err


def test_the_second_pass_goes_where_nothing_is(runs, tmp_path, capsys):
    """A training refuses a run directory that exists."""
    pair = [shutil.copytree(runs / name, tmp_path / name) for name in ("one", "two")]
    places = [f"{tmp_path}/{name}" for name in ("one-refined", "two-refined", "compare-refined")]
    for number, taken in enumerate(["two-refined", "one-refined-2", "end"], 1):
        out = run(capsys, "compare", *pair, "--refine", "--out", tmp_path / f"report{number}")[1]
        suffix = "" if number == 1 else f"-{number}"
        assert all(f"{place}{suffix}" in out for place in places)
        (tmp_path / taken).mkdir()


def test_a_remedy_names_the_settings_where_they_are(tmp_path, capsys):
    """Of one directory with a blank: it can be copied."""
    unknown = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=1, value=nudged())
    one = write_fake_run(tmp_path / "one")
    two = write_fake_run(tmp_path / "two", plants=[unknown])
    report = tmp_path / "a report"
    assert run(capsys, "compare", one, two, "--out", report)[0] == 1
    verdict = json.loads((report / "verdict.json").read_text())
    remedies = [finding["remedy"] for finding in verdict["findings"] if "refine.yaml" in finding["remedy"]]
    assert remedies
    assert all(f"--precision-debug-config '{report}/refine.yaml'" in remedy for remedy in remedies)


def test_refine_writes_the_second_pass_to_a_new_file(runs, tmp_path, capsys):
    file = tmp_path / "second.yaml"
    pair = (runs / "one", runs / "two", "--out", tmp_path / "out")
    status, out, err = run(capsys, "compare", *pair, "--refine", file)
    assert (status, err) == (1, "")
    assert f"--precision-debug-config {file}" in out
    settings = load_settings(file)
    assert (settings.steps.text, settings.stop_after) == ("0", 0)
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert verdict["refine"]["config"] == str(file)
    assert not (tmp_path / "out" / "refine.yaml").exists()
    text = file.read_text()
    _one_line(run(capsys, "compare", *pair, "--refine", file), "the file exists; it is not overwritten")
    assert file.read_text() == text
    # beside the report it is the report's own, as verdict.json is
    for _ in range(2):
        assert run(capsys, "compare", *pair, "--refine")[0] == 1
        assert load_settings(tmp_path / "out" / "refine.yaml").refines == settings.refines


def test_refine_says_where_there_is_nothing_to_refine(runs, tmp_path, capsys):
    file, out = tmp_path / "second.yaml", ("--out", tmp_path / "out")
    start = plant(phase="init", fqn=f"{LINEAR}.weight", value=scaled(2))
    other = write_fake_run(tmp_path / "other", plants=[start])
    full = write_fake_run(tmp_path / "full", level=Level.TENSOR)
    wrong = write_fake_run(tmp_path / "wrong", level=Level.TENSOR, plants=[
        plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=scaled(2))
    ])  # fmt: skip
    cases = (
        (runs / "one", runs / "one", 0, "the runs agree"),
        (runs / "one", other, 1, "the runs differ before the first step"),
        (runs / "idle", runs / "idle", 2, "no record diverges"),
        (full, wrong, 1, "both runs kept the elements"),
    )
    for baseline, candidate, expected, words in cases:
        status, text, err = run(capsys, "compare", baseline, candidate, *out, "--refine", file)
        assert status == expected
        assert f"mindspeed-precision: nothing to refine: {words}" in err
        assert not file.exists()
        assert "--precision-debug-config" not in text


def test_what_two_refined_runs_must_repeat_is_checked(runs, tmp_path, capsys):
    refine = ("--refine", tmp_path / "second.yaml", "--out", tmp_path / "out")
    run(capsys, "compare", runs / "one", runs / "two", *refine)
    manifest = {"settings": load_settings(tmp_path / "second.yaml").source}
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=scaled(2))
    again = write_fake_run(tmp_path / "again", manifest=manifest)
    two = write_fake_run(tmp_path / "two", manifest=manifest, plants=[fault], level=Level.TENSOR)
    status, out, _ = run(capsys, "compare", again, two, "--out", tmp_path / "out")
    assert status == 1
    assert "determinism.not_repeated" not in out
    # the divergence is gone: the runs agree, and that is not what is asked of them
    status, out, _ = run(capsys, "compare", again, again, "--out", tmp_path / "out")
    assert status == 1
    assert out.startswith("IDENTICAL")
    assert "the candidate does not repeat the run that it refines" in out
    spoiled = json.loads((again / "run.json").read_text())
    spoiled["settings"]["refines"]["baseline"]["records"][0][3] = "no phase"
    (again / "run.json").write_text(json.dumps(spoiled))
    _one_line(run(capsys, "compare", again, two, "--out", tmp_path / "out"), "refines.baseline.records[0]")


def _one_line(result, words):
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("mindspeed-precision: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert words in err


def test_show_lists_and_selects(runs, capsys):
    status, out, err = run(
        capsys, "show", runs / "one", "--fqn", f"{LINEAR}*", "--role", "wgrad", "--step", 1
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()[2:]
    assert len(lines) == 4
    assert all(LINEAR in line and "wgrad" in line for line in lines)


def test_show_json(runs, capsys):
    status, out, _ = run(capsys, "show", runs / "one", "--role", "grad_norm", "--json")
    assert status == 0
    assert [entry["step"] for entry in json.loads(out)] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--role", "weights"), "no such role"),
        (("--fqn", "nowhere*"), "none of the run's"),
        (("--step", "9"), "none of the run's"),
    ],
)
def test_show_says_what_does_not_fit(arguments, words, runs, capsys):
    _one_line(run(capsys, "show", runs / "one", *arguments), words)


def test_patches_list_and_explain(capsys):
    status, out, _ = run(capsys, "patches", "list")
    assert status == 0
    name = out.split()[0].partition("/")[2]
    status, out, _ = run(capsys, "patches", "explain", name)
    assert status == 0
    assert name in out
    _one_line(run(capsys, "patches", "explain", "no_such_patch"), "no_such_patch")


@pytest.mark.parametrize("argv", [[], ["compare"], ["compare", "a"], ["conquer"], ["patches"], ["show"]])
def test_incomplete_commands_show_their_usage(argv, capsys):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert "usage: mindspeed-precision" in err


COMMANDS = (
    *("compare", "check", "verify", "show", "ckpt", "data", "evaluation", "export", "msprobe"),
    *("patches", "environment", "preflight", "shrink", "certify", "demo"),
)


def test_help_lists_the_commands_that_exist(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert [command for command in COMMANDS if not re.search(rf"^    {command}\b", text, re.MULTILINE)] == []
    assert "no-such" not in text
    assert build_parser().prog == "mindspeed-precision"


def test_module_runs_as_a_program_without_a_framework(runs, tmp_path):
    blocker = tmp_path / "torch.py"
    blocker.write_text("raise ImportError('the offline half must not import torch')\n")
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_precision", "compare", runs / "one", runs / "two", "--no-replay"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("DIVERGED")


HOSTILE = "a\x1b[31mred\x1b]0;own\x07[red]x[/red]\u202eabc\nnew\rline\x9b2J" + "L" * 300


def test_names_of_a_run_do_nothing_to_a_terminal(tmp_path, capsys):
    """Escapes of a terminal, markup of rich, characters that turn text around, line ends, long names."""
    runs = [write_fake_run(tmp_path / name) for name in ("one", "two")]
    for directory in runs:
        index = directory / "rank00000" / "index.jsonl"
        index.write_text(index.read_text().replace(LINEAR, json.dumps(HOSTILE)[1:-1]))
        (directory / "rank00000" / "COMPLETE").unlink()
        manifest = json.loads((directory / "run.json").read_text())
        manifest["framework"] = {"name": HOSTILE, "version": HOSTILE}
        (directory / "run.json").write_text(json.dumps(manifest))
    for command in (
        ("show", runs[0]),
        ("check", runs[0]),
        ("verify", *runs),
        ("compare", *runs),
        ("data", runs[0]),
    ):
        _, out, err = run(capsys, *command)
        assert out
        assert not [sign for sign in "\x1b\x07\x9b\u202e\r" if sign in out + err], command
    out = run(capsys, "show", runs[0])[1]
    assert "[red]x[/red]" in out
    assert max(map(len, out.splitlines()[2:])) < 300
    assert len(out.splitlines()) == 3 + len(json.loads(run(capsys, "show", runs[0], "--json")[1]))


def test_a_broken_pipe_is_no_error(runs):
    program = f"{sys.executable} -m mindspeed_precision show {runs / 'wide'} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_a_calibrated_comparison(tmp_path, capsys):
    noise = plant(phase="init", role="param", value=scaled(1 + 2.0**-23))
    perturbed = {"settings": {"perturb": {"epsilon": "auto", "seed": 3, "fqn": "*"}}}
    one = write_fake_run(tmp_path / "one", level=Level.TENSOR)
    slightly = plant(phase="fprop", role="output", fqn=LINEAR, value=scaled(1 + 2.0**-23))
    two = write_fake_run(tmp_path / "two", level=Level.TENSOR, plants=[slightly])
    noisy = write_fake_run(tmp_path / "noisy", level=Level.TENSOR, plants=[noise], manifest=perturbed)
    status, out, err = run(capsys, "compare", one, two, "--calibrate", noisy, "--out", tmp_path / "report")
    assert (status, err) == (0, "")
    assert "calibrated" in out
    assert "seed 3" in out
    status, out, err = run(capsys, "compare", one, two, "--calibrate", one, "--out", tmp_path / "report")
    assert (status, out) == (2, "")
    assert "was not perturbed" in err
    assert err.count("\n") == 1


def test_an_interrupt_is_one_line_and_the_status_of_one(monkeypatch, capsys):
    def interrupt(search_path: object = ()) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mindspeed_precision.patching.explain.list_rows", interrupt)
    assert main(["patches", "list"]) == 130
    assert capsys.readouterr().err == "mindspeed-precision: interrupted\n"
