"""What is shown of an examination: what is wrong first, what was looked at, and what was not."""

from __future__ import annotations

import io
import json

import pytest

from mindspeed_precision.records import CheckOutcome, Examination, Finding, Severity
from mindspeed_precision.report.examination import examination_status, examination_text, show_examination

LAW = "main_grad after is before plus dW"


def outcome(name="accumulate.not_the_sum", exercised=4, **changed) -> CheckOutcome:
    return CheckOutcome(name=name, holds=LAW, exercised=exercised, unit="steps", **changed)


def finding(severity) -> Finding:
    return Finding(
        id="accumulate.not_the_sum", severity=severity, confidence=0.9, title="dW was lost", remedy="keep it"
    )


def examination(*outcomes, findings=(), **changed) -> Examination:
    return Examination(
        command="check", subjects={"run": "runs/a"}, outcomes=outcomes, findings=findings, **changed
    )


def shown(answer) -> str:
    stream = io.StringIO()
    show_examination(answer, stream=stream)
    return " ".join(stream.getvalue().split())  # where a line breaks depends on the terminal


def test_what_held_is_said_by_its_law_and_how_often():
    text = shown(examination(outcome(), outcome("a.b", 1)))
    assert text.startswith("PASSED: 2 checks exercised, nothing found.")
    assert f"4 steps: {LAW}" in text
    assert f"1 step: {LAW}" in text


def test_what_failed_comes_first_with_its_name():
    answer = examination(
        outcome("a.b"), outcome(failed=3), findings=(finding(Severity.ERROR), finding(Severity.WARNING))
    )
    text = shown(answer)
    assert text.startswith("FAILED: 1 error, 1 warning.")
    assert "dW was lost" in text
    broken, held = text.split("checked ")[1].split(" [accumulate.not_the_sum] ")
    assert (broken, held) == (f"NOT HELD by 3 of 4 steps: {LAW}", f"4 steps: {LAW}")


def test_a_warning_alone_is_no_failure():
    answer = examination(outcome(), findings=(finding(Severity.WARNING),))
    assert shown(answer).startswith("1 warning, no error; 1 check exercised.")
    assert examination_status(answer) == (0, "")


def test_a_gap_is_named_and_what_cannot_be_there_is_none():
    gap = outcome("reduce.not_the_sum", 0, skipped="no elements were kept")
    alone = outcome("parallel.replicas_differ", 0, skipped="one rank", applies=False)
    text = shown(examination(outcome(), gap, alone))
    assert "reduce.not_the_sum: no elements were kept" in text
    assert "one rank" not in text


def test_an_examination_of_nothing_is_no_answer():
    answer = examination(outcome(exercised=0, skipped="no gradient was recorded"))
    assert shown(answer).startswith("NO ANSWER: nothing was looked at.")
    status, reason = examination_status(answer)
    assert status == 2
    assert "accumulate.not_the_sum: no gradient was recorded" in reason


@pytest.mark.parametrize(("severity", "status"), [(Severity.ERROR, 1), (Severity.INFO, 0)])
def test_json_tells_the_same(severity, status):
    answer = examination(
        outcome(failed=1), findings=(finding(severity),), notes=("rank 1 is missing",), headline="So it is."
    )
    plain = json.loads(examination_text(answer))
    assert plain["schema"] == 1
    assert (plain["command"], plain["subjects"]) == ("check", {"run": "runs/a"})
    assert plain["headline"] == "So it is."
    assert [entry["id"] for entry in plain["findings"]] == ["accumulate.not_the_sum"]
    assert plain["outcomes"][0]["exercised"] == 4
    assert plain["notes"] == ["rank 1 is missing"]
    assert examination_status(answer)[0] == status
