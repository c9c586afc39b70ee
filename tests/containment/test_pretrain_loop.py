"""An error of ours on one of two ranks inside Megatron's own loop: both train on, the other records on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

FAILING = Path(__file__).parent / "scripts" / "fail_on_rank_1.py"


def test_one_rank_stops_recording_and_the_training_is_the_same(megatron, tmp_path):
    from preloaded import run_training

    from mindspeed_precision import load_run
    from mindspeed_precision.testing.demo.arguments import demo_arguments
    from mindspeed_precision.testing.demo.launch import SCRIPT

    out = tmp_path / "run"
    arguments = demo_arguments(iterations=3, global_batch_size=4, dropout=0.0, tp=2)
    flags = ["--precision-debug", "--precision-debug-out", str(out)]
    plain, seen = (
        run_training(
            script,
            [*arguments, *more],
            processes=2,
            megatron=megatron("0.17.1"),
            log=tmp_path / script.stem,
        )
        for script, more in ((SCRIPT, ()), (FAILING, flags))
    )
    assert seen.rows == plain.rows
    assert len(seen.rows) == 3
    said = (tmp_path / FAILING.stem).read_text().count("capture ends here, training goes on")
    assert said == 1
    run = load_run(out)
    assert (run.ranks[0].complete, run.ranks[0].steps) == (True, (-1, 0, 1, 2))
    assert (run.ranks[1].complete, run.ranks[1].steps) == (False, (-1, 0))
    (finding,) = run.ranks[1].findings
    assert finding["id"] == "coverage.capture_ended"
    assert "LookupError: planted in the loop" in finding["title"]
    assert finding["evidence"][0] == "in the patch train_step"
