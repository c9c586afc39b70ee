"""The real pretrain, in bfloat16 with the distributed optimizer, begun with the state of another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.records import INIT_STEP, Phase, Role, Verdict

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

THIN = ("capture.modules=false", "capture.collectives=false")


@pytest.fixture(scope="module")
def train(megatron: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory):
    """Return a function that records three steps of pretrain, tensor-parallel over ``tp`` processes."""
    from preloaded import run_training

    from mindspeed_precision.testing.demo.arguments import demo_arguments
    from mindspeed_precision.testing.demo.launch import SCRIPT

    folder = tmp_path_factory.mktemp("equal_start")

    def run(tp: int, *flags: str, settings: tuple[str, ...] = ()) -> Path:
        out = folder / f"run{len(list(folder.iterdir()))}"
        arguments = demo_arguments(
            tp=tp, iterations=3, global_batch_size=4, dropout=0.0, dtype="bf16", distributed_optimizer=True
        )
        debug = ["--precision-debug", "--precision-debug-out", str(out), *flags]
        run_training(
            SCRIPT,
            [*arguments, *debug, "--precision-debug-set", *THIN, *settings],
            processes=tp,
            megatron=megatron("0.17.1"),
            log=Path(f"{out}.log"),
        )
        return out

    return run


@pytest.fixture(scope="module")
def baseline(train) -> Path:
    return train(1, "--precision-debug-config", "reference")


def initial(diagnosis):
    return {c.verdict for c in diagnosis.comparisons if c.key.step == INIT_STEP}


def test_init_from_gives_another_layout_the_same_weights(train, baseline):
    from mindspeed_precision import compare_runs

    diagnosis = compare_runs(baseline, train(2, settings=(f"init_from={baseline}",)))
    assert initial(diagnosis) == {Verdict.IDENTICAL}
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE
    compared = {c.key.role for c in diagnosis.comparisons if c.key.phase is Phase.OPTIMIZER}
    assert {Role.PARAM, Role.MASTER_PARAM, Role.EXP_AVG} <= compared


@pytest.mark.long
def test_reference_gives_it_the_state_before_each_step(train, baseline):
    from mindspeed_precision import compare_runs

    assert initial(compare_runs(baseline, train(2))) == {Verdict.IDENTICAL, Verdict.DIVERGED}
    diagnosis = compare_runs(baseline, train(2, settings=(f"reference={baseline}",)))
    assert initial(diagnosis) == {Verdict.IDENTICAL}
    assert diagnosis.status is Verdict.WITHIN_TOLERANCE
    assert any("before steps 0-2" in note for note in diagnosis.notes)
    same = compare_runs(baseline, train(1, settings=(f"reference={baseline}",)))
    assert same.status is Verdict.IDENTICAL


@pytest.mark.long
def test_a_reference_that_lacks_something_is_one_line_and_status_2(train, baseline):
    thin = train(1)
    with pytest.raises(ExternalCommandError) as caught:
        train(1, settings=(f"reference={thin}",))
    text = Path(caught.value.remedy.removeprefix("read ")).read_text(encoding="utf-8")
    assert "mindspeed-precision: " in text
    assert "cannot be taken from this run: it did not keep the elements of" in text
    assert caught.value.found == "exit status 2"
    assert "Traceback" not in text.partition("mindspeed-precision: ")[0]
