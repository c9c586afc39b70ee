"""Collectives are recorded whatever the function that stands in their place calls itself."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mindspeed_precision.records import Phase  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


def reduced_in_the_loss(run):
    """Return the records of the all-reduces of the vocabulary-parallel loss, which one rank calls, too."""
    return [r for r in run.ranks[0].records if r.key.phase is Phase.FPROP and r.key.slot == "all_reduce"]


def test_a_collective_that_somebody_wrapped_under_another_name(cpu_megatron, tmp_path, monkeypatch):
    from mindspeed_precision import compare_runs, load_run
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    record_training(TrainerSettings(), tmp_path / "plain")
    original = torch.distributed.all_reduce

    def stranger(*args, **kwargs):
        return original(*args, **kwargs)

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        monkeypatch.setattr(module, "all_reduce", stranger)
    record_training(TrainerSettings(), tmp_path / "wrapped")
    plain, wrapped = load_run(tmp_path / "plain"), load_run(tmp_path / "wrapped")
    assert reduced_in_the_loss(plain)
    assert {r.note for r in reduced_in_the_loss(plain)} == {"over ranks 0"}
    assert len(reduced_in_the_loss(wrapped)) == len(reduced_in_the_loss(plain))
    assert compare_runs(plain, wrapped).status.value == "identical"
