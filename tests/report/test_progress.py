"""Bars on a terminal and nowhere else; a stage tells how far it is, whoever listens."""

from __future__ import annotations

import io
import re

import pytest

from mindspeed_precision.flow import compare_runs
from mindspeed_precision.progress import silent
from mindspeed_precision.report.progress import StepBar, progress_bar
from mindspeed_precision.testing.fake_runs import LINEAR, nudged, plant, write_fake_run

rich = pytest.importorskip("rich")


class Terminal(io.StringIO):
    """A stream that says that somebody looks at it."""

    def isatty(self):
        return True


def plain(stream):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_comparison_tells_each_stage_to_its_end(tmp_path):
    one = write_fake_run(tmp_path / "a", payloads=f"{LINEAR}*")
    fault = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=nudged(3))
    two = write_fake_run(tmp_path / "b", payloads=f"{LINEAR}*", plants=[fault])
    told: list[tuple[str, int, int | None]] = []
    diagnosis = compare_runs(one, two, progress=lambda *said: told.append(said))
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == ["loading", "aligning", "comparing", "replaying"]
    last = {stage: (done, total) for stage, done, total in told}
    assert last["loading"] == (2, 2)
    assert last["comparing"] == (len(diagnosis.comparisons),) * 2
    assert last["replaying"][0] == last["replaying"][1] >= 1


def test_on_a_terminal_a_bar_is_shown_and_gone_again():
    out = Terminal()
    with progress_bar(stream=out) as progress:
        progress("comparing", 0, 3)
        progress("comparing", 3, 3)
        progress("replaying", 1, 1)
    assert "comparing" in plain(out)
    assert "3/3" in plain(out)
    assert "replaying" in plain(out)
    assert "\x1b[2K" in out.getvalue()  # the line is erased


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_no_terminal_gets_nothing(wanted):
    out = io.StringIO()
    with progress_bar(stream=out, wanted=wanted) as progress:
        assert progress is silent
    assert out.getvalue() == ""


def test_a_machine_that_reads_gets_nothing_on_a_terminal_either():
    out = Terminal()
    with progress_bar(stream=out, wanted=False) as progress:
        progress("comparing", 1, 3)
    assert out.getvalue() == ""


def test_a_step_bar_leaves_the_cursor_where_the_next_line_takes_its_place():
    out = Terminal()
    bar = StepBar(10, stream=out)
    bar.step(3)
    assert re.search(r"recording .* 3/10 steps, 0 s\r$", plain(out))
    bar.close()
    assert out.getvalue().endswith("\r\x1b[2K")


def test_a_step_bar_without_a_known_end_counts():
    out = Terminal()
    StepBar(None, stream=out).step(3)
    assert " 3 steps, " in plain(out)


def test_a_step_bar_in_a_log_is_nothing():
    out = io.StringIO()
    bar = StepBar(10, stream=out)
    bar.step(3)
    bar.close()
    assert out.getvalue() == ""
