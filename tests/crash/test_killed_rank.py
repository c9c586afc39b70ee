"""A rank is killed in the middle of a step: what was complete is compared, and what is missing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.errors import ExternalCommandError

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

SCRIPT = Path(__file__).parent / "scripts" / "record_until_killed.py"


@pytest.fixture(scope="module")
def baseline(megatron, tmp_path_factory) -> Path:
    """Return a run of three steps that nobody killed."""
    out = tmp_path_factory.mktemp("whole") / "baseline"
    record(megatron, out, -1, 0)
    return out


def record(megatron, out: Path, victim: int, step: int) -> None:
    from mindspeed_precision.testing.demo.launch import run_training

    run_training(
        SCRIPT,
        [str(out), str(victim), str(step)],
        processes=2,
        megatron=megatron("0.17.1"),
        log=out.with_suffix(".log"),
        timeout=120,
    )


def test_the_whole_steps_of_a_killed_run_are_compared(megatron, baseline, tmp_path, capsys):
    from mindspeed_precision import load_run

    with pytest.raises(ExternalCommandError):
        record(megatron, tmp_path / "candidate", 1, 2)
    candidate = load_run(tmp_path / "candidate")
    assert candidate.ranks[1].steps == (-1, 0, 1)
    assert not candidate.ranks[1].complete
    status = main(["compare", str(baseline), str(tmp_path / "candidate"), "--out", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert status == 0
    assert text.startswith("IDENTICAL")
    assert "steps 0 to 1" in text
    assert "COMPLETE" in text or "did not end" in text or "not complete" in text
    assert "step 2" in text


def test_a_rank_killed_in_its_first_step_leaves_nothing_to_compare(megatron, baseline, tmp_path, capsys):
    with pytest.raises(ExternalCommandError):
        record(megatron, tmp_path / "candidate", 1, 0)
    status = main(["compare", str(baseline), str(tmp_path / "candidate"), "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert status == 2
    assert len(captured.err.splitlines()) == 1
