"""Launches that begin in one directory at the same moment: one gets it, the others are told so."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from mindspeed_precision.dump import attempts
from mindspeed_precision.dump.attempts import begin_attempt, end_attempt
from mindspeed_precision.dump.writer import write_manifest
from mindspeed_precision.errors import DumpError


@pytest.mark.parametrize("linking", [True, False])
def test_one_of_two_that_found_it_empty_gets_it(tmp_path, monkeypatch, linking):
    def refused(*_args):
        raise PermissionError(1, "no hard links here")

    if not linking:
        monkeypatch.setattr(os, "link", refused)
    run = tmp_path / "run"
    for _ in range(2):
        assert begin_attempt(run, "refuse") == run  # both looked before either wrote
        end_attempt(run)
    write_manifest(run, {"launch": 1})
    if linking:
        with pytest.raises(DumpError, match=r"another launch began.*--precision-debug-out"):
            write_manifest(run, {"launch": 2})
    assert json.loads((run / "run.json").read_text())["launch"] == 1
    assert [path.name for path in run.iterdir()] == ["run.json"]


class OfNobody(set[Path]):
    """Runs that this process has begun: none, as if each launch were a process of its own."""

    def __contains__(self, run: object) -> bool:
        return False


def test_one_of_many_at_once_gets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "_begun", OfNobody())
    launches, begun = 8, []
    barrier = threading.Barrier(launches)

    def launch(number: int) -> None:
        barrier.wait(60)
        try:
            directory = begin_attempt(tmp_path / "run", "refuse")
            write_manifest(directory, {"launch": number})
        except DumpError:
            return
        begun.append(number)

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(launches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (number,) = begun
    assert json.loads((tmp_path / "run" / "run.json").read_text())["launch"] == number
