"""Buffers of modules are recorded, and two runs whose buffers differ are told where: running statistics."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  only where torch is

from mindspeed_precision import Session, compare_runs, load_run  # noqa: E402
from mindspeed_precision.records import Phase, Role, Verdict  # noqa: E402

pytestmark = pytest.mark.torch

MEAN = "1.running_mean"


def train(directory, *, start=0.0, shift=0.0):
    """Record two steps of a linear and a batch norm, whose running mean begins or moves otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean += start
    data = torch.randn(2, 8, 4)
    with Session(
        model=model, optimizer=None, out=directory, overrides=["determinism.enabled=false"]
    ) as session:
        for batch in data:
            model(batch).square().sum().backward()
            model[1].running_mean += shift
            session.step()
    return load_run(directory)


def first(diagnosis):
    assert diagnosis.status is Verdict.DIVERGED
    key = diagnosis.first_divergence.key
    return key.step, key.phase, key.fqn, [finding.id for finding in diagnosis.findings]


def test_they_are_recorded_at_the_start_and_after_each_step(tmp_path):
    run = train(tmp_path / "run")
    keys = [r.key for r in run.ranks[0].records if r.key.role is Role.BUFFER and r.key.fqn == MEAN]
    assert [(key.step, key.phase) for key in keys] == [
        (-1, Phase.INIT),
        (0, Phase.OPTIMIZER),
        (1, Phase.OPTIMIZER),
    ]


def test_a_run_and_its_repeat_have_the_same_ones(tmp_path):
    diagnosis = compare_runs(train(tmp_path / "one"), train(tmp_path / "two"))
    assert diagnosis.status is Verdict.IDENTICAL
    assert diagnosis.findings == ()


def test_one_that_began_otherwise(tmp_path):
    diagnosis = compare_runs(train(tmp_path / "one"), train(tmp_path / "two", start=1.0))
    assert first(diagnosis) == (-1, Phase.INIT, MEAN, ["weights.buffer_differs"])


def test_one_that_a_step_leaves_otherwise(tmp_path):
    diagnosis = compare_runs(train(tmp_path / "one"), train(tmp_path / "two", shift=1.0))
    assert first(diagnosis) == (0, Phase.OPTIMIZER, MEAN, ["model.buffer_differs"])
