"""Results of two evaluations: what chance explains, what it does not, what cannot be told."""

from __future__ import annotations

import json
import math

import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.evaluation import Score, compare_evaluations, read_results


def harness(path, **tasks):
    path.write_text(json.dumps({"results": tasks, "versions": {}, "config": {"model": "hf"}}))
    return path


def accuracy(value, stderr=0.01):
    return {"alias": "x", "acc,none": value, "acc_stderr,none": stderr}


def ids(found):
    return [finding.id for finding in found.findings]


def test_a_difference_within_the_standard_error_is_none(tmp_path):
    one = harness(tmp_path / "a.json", arc=accuracy(0.512), boolq=accuracy(0.7))
    two = harness(tmp_path / "b.json", arc=accuracy(0.508), boolq=accuracy(0.7))
    found = compare_evaluations(one, two)
    assert ids(found) == []
    assert found.tables["scores"][1].endswith("within the standard error")
    assert found.tables["scores"][2].endswith("the same")
    assert found.outcomes[0].exercised == 2


def test_a_difference_of_many_standard_errors_is_an_error(tmp_path):
    one = harness(tmp_path / "a.json", arc=accuracy(0.40, 0.005))
    two = harness(tmp_path / "b.json", arc=accuracy(0.35, 0.005))
    found = compare_evaluations(one, two)
    assert ids(found) == ["evaluation.differs"]
    assert found.findings[0].title == "arc acc differs by 7.1 standard errors"
    assert "lower by 0.05" in found.findings[0].evidence[0]
    assert main(["evaluation", str(one), str(two)]) == 1


@pytest.mark.parametrize(("gap", "expected"), [(0.027, []), (0.029, ["evaluation.differs"])])
def test_the_bound_is_two_standard_errors_of_the_difference(tmp_path, gap, expected):
    one = harness(tmp_path / "a.json", arc=accuracy(0.4))
    two = harness(tmp_path / "b.json", arc=accuracy(0.4 + gap))
    assert ids(compare_evaluations(one, two)) == expected  # 2 · √2 · 0.01 = 0.0283


def test_without_a_standard_error_a_difference_is_not_decided_and_equality_is(tmp_path):
    (tmp_path / "a.txt").write_text("mmlu: 0.71\nceval = 65.2%\n")
    (tmp_path / "b.txt").write_text("mmlu: 0.70\nceval = 65.2%\n")
    found = compare_evaluations(tmp_path / "a.txt", tmp_path / "b.txt")
    assert ids(found) == ["evaluation.undecided"]
    assert found.findings[0].title.startswith("mmlu differs, and no standard error is known")
    assert main(["evaluation", str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]) == 0


def test_missing_tasks_are_named_on_both_sides(tmp_path):
    one = harness(tmp_path / "a.json", arc=accuracy(0.5), boolq=accuracy(0.7))
    two = harness(tmp_path / "b.json", arc=accuracy(0.5), piqa=accuracy(0.7))
    found = compare_evaluations(one, two)
    assert [(f.id, f.title, f.evidence) for f in found.findings] == [
        ("evaluation.missing_task", "1 metric of the baseline alone", ("boolq acc",)),
        ("evaluation.missing_task", "1 metric of the candidate alone", ("piqa acc",)),
    ]


def test_nothing_in_common_is_no_answer(tmp_path, capsys):
    one = harness(tmp_path / "a.json", arc=accuracy(0.5))
    two = harness(tmp_path / "b.json", piqa=accuracy(0.5))
    assert main(["evaluation", str(one), str(two)]) == 2
    assert "no metric is in both: arc acc in the one, piqa acc in the other" in capsys.readouterr().err


def test_nan_is_an_error_on_one_side_and_on_both(tmp_path):
    (tmp_path / "a.txt").write_text("ppl: nan\nother: nan\n")
    (tmp_path / "b.txt").write_text("ppl: 12.1\nother: nan\n")
    found = compare_evaluations(tmp_path / "a.txt", tmp_path / "b.txt")
    assert ids(found) == ["evaluation.nonfinite"] * 2


def test_the_older_form_of_the_harness_and_its_filters(tmp_path):
    tasks = {
        "old": {"acc": 0.5, "acc_stderr": 0.02},
        "gsm8k": {"exact_match,strict-match": 0.3, "exact_match_stderr,strict-match": 0.01},
        "none": {"acc,none": 0.1, "acc_stderr,none": "N/A"},
    }
    assert read_results(harness(tmp_path / "a.json", **tasks)).scores == {
        ("old", "acc"): Score(value=0.5, stderr=0.02),
        ("gsm8k", "exact_match (strict-match)"): Score(value=0.3, stderr=0.01),
        ("none", "acc"): Score(value=0.1),
    }


def test_plain_json(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps({"mmlu": 0.7, "arc": {"acc": 0.5, "stderr": 0.1}, "by": "me"})
    )
    found = read_results(tmp_path / "a.json")
    assert found.scores == {("mmlu", ""): Score(value=0.7), ("arc", "acc"): Score(value=0.5, stderr=0.1)}
    assert found.left_out == ("by: str",)


def test_a_number_that_no_float_holds_is_left_out(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"a": 10**400, "b": {"acc": 0.5, "n": 10**400}}))
    found = read_results(tmp_path / "a.json")
    assert list(found.scores) == [("b", "acc")]
    assert found.left_out == ("a: int",)


def test_a_table_of_subjects_with_the_number_of_questions_has_a_standard_error(tmp_path):
    """As MindSpeed-LLM's evaluation writes it: subject, question_n, acc."""
    (tmp_path / "a.csv").write_text("subject,question_n,acc\nlaw,101,0.5\ntotal,11,0.8\n")
    found = read_results(tmp_path / "a.csv")
    assert found.scores[("law", "acc")] == Score(value=0.5, stderr=math.sqrt(0.25 / 100), derived=True)
    notes = compare_evaluations(tmp_path / "a.csv", tmp_path / "a.csv").notes
    assert "standard errors of shares were derived from the number of questions" in notes


def test_a_table_with_a_metric_column(tmp_path):
    (tmp_path / "a.csv").write_text(
        "Tasks,Version,Metric,Value,Stderr\narc,1,acc,0.5,0.02\narc,1,f1,0.6,\nx,1,,n/a,\n"
    )
    found = read_results(tmp_path / "a.csv")
    assert found.scores == {
        ("arc", "acc"): Score(value=0.5, stderr=0.02),
        ("arc", "f1"): Score(value=0.6),
    }
    assert found.left_out == ("row x: no number",)


def test_lines_with_a_standard_error_and_what_is_no_score(tmp_path):
    (tmp_path / "a.txt").write_text("# my run\nmmlu: 0.71 ± 0.02\narc: 1e-1 +/- .5\n")
    found = read_results(tmp_path / "a.txt")
    assert found.scores == {
        ("mmlu", ""): Score(value=0.71, stderr=0.02),
        ("arc", ""): Score(value=0.1, stderr=0.5),
    }
    assert found.left_out == ("line '# my run'",)


def test_validation_losses_of_megatrons_log(tmp_path):
    (tmp_path / "train.log").write_text(
        " [2026-01-01] iteration 10/ 20 | lm loss: 5.1E+00 |\n"
        " validation loss at iteration 10 | lm loss value: 5.101404E+00 | lm loss PPL: 164.2525 |\n"
        " validation loss at iteration 20 on test set | lm loss value: 4.0E+00 | lm loss PPL: 5.4E+01 |\n"
    )
    found = read_results(tmp_path / "train.log")
    assert found.kind == "Megatron's log"
    assert found.scores == {
        ("validation loss at iteration 10", "lm loss"): Score(value=5.101404),
        ("validation loss at iteration 10", "lm loss PPL"): Score(value=164.2525),
        ("validation loss at iteration 20 on test set", "lm loss"): Score(value=4.0),
        ("validation loss at iteration 20 on test set", "lm loss PPL"): Score(value=54.0),
    }


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "not readable as JSON"),
        ("a.json", "[1]", "not an object"),
        ("a.json", "[" * 100_000, "not readable as JSON"),
        ("a.json", '{"a": "b"}', "no score in this file"),
        ("a.csv", "x,y\n1,2\n", "no column names the task"),
        ("a.csv", "", "no column names the task"),
        ("a.txt", "hello\n", "no score in this file"),
        ("a.csv", "task,acc\nx,0.1\nx,0.2\n", "there twice, with two values"),
    ],
)
def test_bad_input_is_one_error(tmp_path, capsys, name, text, said):
    (tmp_path / name).write_text(text)
    assert main(["evaluation", str(tmp_path / name), str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_run_directory_is_told_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match="give the log of the training"):
        read_results(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(tmp_path / "absent.json")


def test_json_has_the_same_facts(tmp_path, capsys):
    one = harness(tmp_path / "a.json", arc=accuracy(0.5))
    assert main(["evaluation", str(one), str(one), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == "evaluation"
    assert told["outcomes"][0]["exercised"] == 1


def test_nan_on_both_sides_is_no_agreement(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text('{"acc": NaN}')
    found = compare_evaluations(tmp_path / "a.json", tmp_path / "b.json")
    assert ids(found) == ["evaluation.nonfinite"]
    assert "on no side" in found.findings[0].title
