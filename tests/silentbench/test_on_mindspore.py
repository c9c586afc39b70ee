"""Bugs of the list on MindSpore itself are found, and the healthy twin is not accused."""

from __future__ import annotations

import pytest

from silentbench import native

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def runs(mindspore_native_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mindspore")
    native.record(folder, mindspore_native_python)
    assert native.missing(folder) == []
    return folder


@pytest.mark.parametrize("id_", native.CASES)
def test_a_bug_on_mindspore(runs, id_):
    score = native.score(id_, runs)
    assert score.false_alarms == ()
    for what in ("detected", "place", "cause"):
        assert score.any_of(what), score.marks
    assert all(mark.detected for mark in score.marks.values() if mark.expected)


def test_without_the_environment_the_cases_are_named_as_not_run(monkeypatch, tmp_path):
    monkeypatch.setenv(native.PYTHON, str(tmp_path / "nowhere"))
    scores, why_not = native.scores(tmp_path / "runs")
    assert scores == []
    assert "nowhere" in why_not
    assert native.PYTHON in why_not
