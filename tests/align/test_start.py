"""A resumed run is compared with the run that went on; weights that were loaded wrong are still found."""

from __future__ import annotations

import pytest

from mindspeed_precision import compare_runs
from mindspeed_precision.records import Verdict

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]


@pytest.fixture
def resume(cpu_megatron, tmp_path):
    """Record steps 0 to 2, and steps 1 and 2 of a run that was recorded from there; compare them."""

    def run(change=None, *, overrides=()):
        from mindspeed_precision import Session
        from mindspeed_precision.testing.recorded import UNPINNED, record_training
        from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

        record_training(TrainerSettings(), tmp_path / "straight", steps=3, overrides=overrides)
        with CpuTrainer(TrainerSettings()) as trainer:
            trainer.train(1)
            if change is not None:
                change(dict(trainer.model[0].module.named_parameters()))
            with Session(
                model=trainer.model, optimizer=trainer.optimizer, out=tmp_path / "resumed", overrides=UNPINNED
            ) as session:
                trainer.forward_step = session.forward_step(trainer.forward_step)
                session.begin_step(1)
                for _ in range(2):
                    session.step(loss=trainer.train_one_step().loss)
        forth = compare_runs(tmp_path / "straight", tmp_path / "resumed")
        back = compare_runs(tmp_path / "resumed", tmp_path / "straight")
        return forth, back

    return run


def test_a_run_that_went_on(resume):
    for diagnosis in resume():
        assert diagnosis.status is Verdict.IDENTICAL
        assert diagnosis.findings == ()
        assert any("begins at step 1" in note and "after step 0" in note for note in diagnosis.notes)
        assert sum(comparison.key.step == -1 for comparison in diagnosis.comparisons) == 27


def test_a_weight_that_was_loaded_wrong(resume):
    name = "decoder.layers.1.mlp.linear_fc1.weight"

    def change(parameters):
        with torch.no_grad():
            parameters[name].view(-1)[0] += 0.5

    for diagnosis in resume(change):
        assert diagnosis.status is Verdict.DIVERGED
        assert (diagnosis.first_divergence.key.step, diagnosis.first_divergence.key.fqn) == (-1, name)
        assert diagnosis.findings[0].id == "weights.initial_differs"


def test_where_the_step_before_was_not_recorded(resume):
    for diagnosis in resume(overrides=["steps=1-2"]):
        assert diagnosis.status is Verdict.IDENTICAL
        assert any("initial parameters not compared" in note for note in diagnosis.notes)
