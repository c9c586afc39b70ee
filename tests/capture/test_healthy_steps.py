"""Healthy steps of megatron-core that once crashed a recorded training, or were taken for a gap."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


@pytest.fixture
def record(cpu_megatron, tmp_path):
    """Record two steps, with a change to the trainer before, and a call after each; return the run."""

    def run(plant=None, after_step=None, *, overrides=(), **options):
        from mindspeed_precision import Session, load_run
        from mindspeed_precision.testing.recorded import UNPINNED
        from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

        out = tmp_path / "run"
        with CpuTrainer(TrainerSettings(**options)) as trainer:
            if plant is not None:
                plant(trainer)
            with Session(
                model=trainer.model,
                optimizer=trainer.optimizer,
                out=out,
                overrides=[*UNPINNED, *overrides],
            ) as session:
                trainer.forward_step = session.forward_step(trainer.forward_step)
                for _ in range(2):
                    trainer.train_one_step()
                    session.step()
                    if after_step is not None:
                        after_step(trainer)
        return load_run(out)

    return run


def checkpoint_mlps(trainer):
    """Recompute each MLP by torch's own checkpoint, which lets saved tensors be unpacked once."""

    def checkpointed(forward):
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for layer in trainer.model[0].module.decoder.layers:
        layer.mlp.forward = checkpointed(layer.mlp.forward)


def test_a_checkpoint_of_torch(record):
    run = record(checkpoint_mlps)
    assert run.manifest["findings"] == []
    assert any(record.key.recomputed for record in run.ranks[0].records)


def test_only_norms_are_trained(record):
    """No parallel linear has a dW, so that its patches are rightly never called."""
    run = record(frozen=("*linear*", "*embedding*"))
    assert run.manifest["findings"] == []
    assert run.ranks[0].steps == (-1, 0, 1)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_an_evaluation_between_steps_is_no_microbatch(record, mode):
    def evaluate(trainer):
        (model,) = trainer.model
        model.train(mode == "train")
        with torch.no_grad():
            _, loss = trainer.forward_step(trainer._data, model)
            loss(torch.ones(2, 32))
        model.train()

    run = record(after_step=evaluate)
    assert run.manifest["findings"] == []
    assert run.ranks[0].microbatches == {-1: 0, 0: 2, 1: 2}
    keys = [record.key for record in run.ranks[0].records]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("level", "most"), [("statistics", 2048), ("fingerprint", 1024)])
def test_what_a_record_takes_on_the_disk(level, most, record):
    """At most 2 KiB as recorded by default: every file of the run counts, in a run as short as this."""
    run = record(overrides=[f"capture.level={level}"] if level != "statistics" else [])
    size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
    records = sum(len(rank.records) for rank in run.ranks.values())
    assert records > 1000
    assert size / records <= most, f"{size / records:.0f} bytes"
    longest = max(
        (run.path / "rank00000" / "index.jsonl").read_bytes().splitlines(),
        key=lambda line: len(line) * (b'"record"' in line[:20]),
    )
    assert len(longest) <= 2048
