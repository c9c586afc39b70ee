"""compare, show and msprobe on the command line."""

from __future__ import annotations

import json

import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.testing.fake_runs import write_fake_run

L0 = "torch-L0-statistics-statistics"


def test_show_says_what_it_is_and_prints_no_fingerprint(golden, capsys):
    assert main(["show", str(golden(L0)), "--fqn", "fc1*"]) == 0
    out = capsys.readouterr().out
    assert "dumped by msprobe" in out
    assert "0000000000000000" not in out
    assert main(["show", str(golden(L0)), "--json"]) == 0
    assert {row["fingerprint"] for row in json.loads(capsys.readouterr().out)} == {None}


def test_compare_writes_a_report(golden, tmp_path, capsys):
    status = main(["compare", str(golden(L0)), str(golden(L0)), "--out", str(tmp_path / "report")])
    assert status == 0
    assert "WITHIN TOLERANCE" in capsys.readouterr().out
    assert json.loads((tmp_path / "report" / "verdict.json").read_text())["status"] == "within_tolerance"


def test_export_and_back(tmp_path, capsys):
    write_fake_run(tmp_path / "run")
    assert main(["msprobe", "export", str(tmp_path / "run"), "--out", str(tmp_path / "dump")]) == 0
    assert "entries, task statistics" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "dump"), "--out", str(tmp_path / "r")]) == 0


@pytest.mark.parametrize("command", ["check"])
def test_commands_that_take_no_dump_say_so(golden, capsys, command):
    assert main([command, str(golden(L0))]) == 2
    assert "not a run" in capsys.readouterr().err
