"""Two runs that should be one; a run and its two parts: what is certified, what is named."""

from __future__ import annotations

import json

import pytest

from mindspeed_precision.certify import certify_runs, examination_of, write_certificate
from mindspeed_precision.certify.certificate import digest_of
from mindspeed_precision.cli import main
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.report.examination import examination_status
from mindspeed_precision.testing.fake_runs import LINEAR, plant, scaled, write_fake_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        write_fake_run(directory / name, steps=3)
    fault = plant(phase="fprop", role="output", fqn=LINEAR, step=1, value=scaled(1.001))
    write_fake_run(directory / "other", steps=3, plants=[fault])
    lost = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=2, drop=True)
    write_fake_run(directory / "lacking", steps=3, plants=[lost])
    for name in ("idle", "idle too"):
        write_fake_run(directory / name, lr=0.0)
    return directory


def test_equal_runs_are_certified_and_the_file_says_of_what(runs, tmp_path):
    certificate = certify_runs(runs / "one", runs / "two")
    assert certificate.certified
    assert certificate.through == 2
    assert certificate.statement.startswith("CERTIFIED: bit-equal through step 2 over 100 % of ")
    told = json.loads(write_certificate(certificate, tmp_path).read_text())
    assert (told["certified"], told["bit_equal_through_step"], told["records"]["percent"]) == (True, 2, 100.0)
    assert told["records"]["records"] == sum(len(r.records) for r in load_run(runs / "one").ranks.values())
    assert told["runs"]["run"]["digest"] == digest_of(load_run(runs / "one"))
    assert told["runs"]["run"]["digest"] != digest_of(load_run(runs / "other"))
    assert told["first_difference"] is None


def test_what_did_not_repeat_is_named_with_its_inputs(runs):
    certificate = certify_runs(runs / "one", runs / "other")
    assert not certificate.certified
    assert certificate.through == 0
    assert certificate.statement.startswith("NOT REPEATED: bit-equal through step 0 alone; ")
    finding = certificate.findings[0]
    assert (finding.id, finding.where.step, finding.where.fqn) == ("determinism.operation", 1, LINEAR)
    assert any(line.startswith("its inputs: ") for line in finding.evidence)
    assert examination_status(examination_of(certificate)) == (1, "")


def test_a_record_of_one_run_alone_is_no_agreement(runs):
    certificate = certify_runs(runs / "one", runs / "lacking")
    assert not certificate.certified
    examination = examination_of(certificate)
    assert examination_status(examination)[0] in (1, 2)
    assert any(LINEAR in line for line in examination.tables["not compared"])
    assert certificate.through == 1


def test_nothing_trained_is_nothing_certified(runs):
    certificate = certify_runs(runs / "idle", runs / "idle too")
    assert not certificate.certified
    assert certificate.statement.startswith("NOT CERTIFIED: ")
    status, reason = examination_status(examination_of(certificate))
    assert status == 2
    assert "learning rate" in reason


def test_a_crashed_run_is_not_certified(runs, tmp_path):
    write_fake_run(tmp_path / "crashed", steps=3)
    (tmp_path / "crashed" / "rank00000" / "COMPLETE").unlink()
    certificate = certify_runs(runs / "one", tmp_path / "crashed")
    assert not certificate.certified
    assert "a run did not end as planned" in certificate.statement


def test_command(runs, tmp_path, capsys):
    one, two, other = (str(runs / name) for name in ("one", "two", "other"))
    out = ["--out", str(tmp_path / "out")]
    assert main(["certify", one, two, *out]) == 0
    assert "CERTIFIED: bit-equal through step 2" in capsys.readouterr().out
    assert main(["certify", "--json", one, other, *out]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["id"] == "determinism.operation"
    assert main(["certify", str(runs / "idle"), str(runs / "idle too"), *out]) == 2
    assert "certify looked at nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["certify"], "give runs, or a launch behind --"),
        (["certify", "a"], "a certificate is about two runs"),
        (["certify", "a", "b", "c", "d"], "a certificate is about two runs"),
        (["certify", "a", "b"], "a: "),
        (["certify", "a", "b", "--", "t.py"], "give runs, or a launch behind --"),
    ],
)
def test_bad_input_is_one_line(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_another_number_of_runs():
    with pytest.raises(ConfigError, match="two runs, or about three"):
        certify_runs("a")


def test_one_run_given_twice_is_refused(tmp_path):
    run = write_fake_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="one run given twice"):
        certify_runs(run, tmp_path / "x" / ".." / "run")
