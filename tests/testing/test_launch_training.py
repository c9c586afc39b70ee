"""Starting a run and reading its log."""

from __future__ import annotations

import pytest

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.testing.demo.launch import LogRow, parse_log, run_training

pytestmark = pytest.mark.torch

LOG = """
 [2026-01-01 10:00:00.000000] iteration        1/       5 | consumed samples:            8 | elapsed time per iteration (ms): 166.3 | learning rate: 1.000000E-03 | global batch size:     8 | lm loss: 5.532395E+00 | loss scale: 1.0 | grad norm: 3.796 | number of skipped iterations:   0 | number of nan iterations:   0 |
noise
 [2026-01-01 10:00:01.000000] iteration        2/       5 | consumed samples:           16 | elapsed time per iteration (ms): 66.3 | learning rate: 1.000000E-03 | global batch size:     8 | loss scale: 512.0 | number of skipped iterations:   1 | number of nan iterations:   0 |
"""  # noqa: E501 - as Megatron prints it


def test_rows_keep_the_printed_digits():
    assert parse_log(LOG) == (
        LogRow(iteration=1, loss="5.532395E+00", grad_norm="3.796"),
        LogRow(iteration=2, loss="", grad_norm=""),
    )
    assert parse_log("nothing was trained") == ()


@pytest.mark.matrix
def test_a_failed_run_says_what_the_rank_said(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('the rank gave up')\n")
    with pytest.raises(ExternalCommandError) as caught:
        run_training(script, [], log=tmp_path / "logs" / "broken.txt")
    message = str(caught.value)
    assert "the rank gave up" in message
    assert "broken.txt" in message
    assert "ChildFailedError" not in message
    assert caught.value.found == "exit status 1"


@pytest.mark.matrix
def test_a_run_that_hangs_is_stopped(tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text("import time; print('asleep', flush=True); time.sleep(600)\n")
    with pytest.raises(ExternalCommandError, match="stopped after 5 s"):
        run_training(script, [], log=tmp_path / "log.txt", timeout=5)


@pytest.mark.matrix
def test_threads_are_pinned_and_the_environment_is_passed_on(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("import os, torch; print('SEEN', torch.get_num_threads(), os.environ['EXTRA'])\n")
    done = run_training(script, [], log=tmp_path / "log.txt", environment={"EXTRA": "given"})
    assert "SEEN 1 given" in done.text
