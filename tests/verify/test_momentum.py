"""Gradient descent with momentum, computed anew: faults and their healthy twins."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.records import MOMENTUM, Level
from mindspeed_precision.testing.fake_runs import LINEAR, constant, nudged, plant, scaled, write_fake_run
from mindspeed_precision.verify.check import check_run

WEIGHT = f"{LINEAR}.weight"
STATE, STEP = "optimizer.state_not_recomputed", "optimizer.update_not_recomputed"
COUNTS = ("optimizer.step_counter", "optimizer.state_reset")  # of Adam: SGD has no count
CONFIG = {"megatron_args": {}, "optimizer_config": {}, "transformer_config": {}, "ddp_config": {}}
SHAPE = {
    "steps": 3,
    "level": Level.STATISTICS,
    "payloads": "*",
    "weight_decay": 0.01,
    "momentum": 0.9,
    "manifest": {"config": CONFIG, "first_step": 0},
}


def check(directory, *plants, **changes):
    examination = check_run(write_fake_run(directory, **{**SHAPE, "plants": plants, **changes}))
    found = {f.id: f for f in examination.findings if f.id in (STATE, STEP, *COUNTS)}
    return found, {outcome.name: outcome for outcome in examination.outcomes}


def at(role, slot="*", step=1, **fault):
    return plant(role=role, slot=slot, phase="optimizer", step=step, fqn=WEIGHT, **fault)


@pytest.mark.parametrize(
    "changes",
    [{}, {"nesterov": True}, {"dampening": 0.5}, {"weight_decay": 0.0}, {"lr": 0.3}, {"ranks": 2}],
    ids=["plain", "nesterov", "dampened", "undecayed", "fast", "two ranks"],
)
def test_healthy_momentum(tmp_path, changes):
    found, outcomes = check(tmp_path / "run", **changes)
    assert not found
    for name in (STATE, STEP):
        assert outcomes[name].exercised == 3 * 6 * changes.get("ranks", 1)
        assert outcomes[name].skipped == ""


def test_a_buffer_that_is_off(tmp_path):
    found, _ = check(tmp_path / "run", at("exp_avg", MOMENTUM, value=scaled(1.00001)))
    assert set(found) == {STATE}
    assert (found[STATE].where.step, found[STATE].where.fqn) == (1, WEIGHT)


def test_a_buffer_that_is_off_by_a_rounding(tmp_path):
    assert not check(tmp_path / "run", at("exp_avg", MOMENTUM, value=nudged()))[0]


def test_a_buffer_that_was_lost(tmp_path):
    """What the kernel found was zero: the buffer of the step before is recorded, and did not enter."""
    lost = at("exp_avg", MOMENTUM, step=0, value=constant(0.0), recorded=lambda _: np.full((8, 8), 0.5, "f4"))
    found, _ = check(tmp_path / "run", lost)
    assert "the state was lost" in " ".join(f.title for f in found.values())


def test_a_buffer_that_was_not_updated(tmp_path):
    stays = plant(role="exp_avg", slot=MOMENTUM, phase="optimizer", fqn=WEIGHT, value=constant(0.25))
    examination = check_run(write_fake_run(tmp_path / "run", **{**SHAPE, "plants": (stays,)}))
    titles = [finding.title for finding in examination.findings if finding.id == STATE]
    assert any("it was not updated" in title for title in titles)


def test_a_parameter_that_is_off(tmp_path):
    found, _ = check(tmp_path / "run", at("param", value=scaled(1.00001)))
    assert set(found) == {STEP}
    assert (found[STEP].where.step, found[STEP].where.fqn) == (1, WEIGHT)


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"nesterov": True}, "nesterov was left out"), ({}, "nesterov was applied")],
)
def test_a_kernel_that_takes_the_other_direction(tmp_path, changes, text, monkeypatch):
    """The group says one thing, the kernel does the other."""
    from mindspeed_precision.testing import fake_runs

    asked = fake_runs._effective

    def other(run, parameters):
        found = asked(run, parameters)
        for group in found["groups"]:
            group["settings"]["nesterov"] = not group["settings"]["nesterov"]
        return found

    monkeypatch.setattr(fake_runs, "_effective", other)
    found, _ = check(tmp_path / "run", nesterov=not changes.get("nesterov", False))
    assert set(found) == {STEP}
    assert text in found[STEP].title


def test_a_parameter_that_was_not_written(tmp_path):
    found, _ = check(tmp_path / "run", unwritten=frozenset({WEIGHT}))
    assert "the parameter was not written" in found[STEP].title


def test_a_buffer_that_was_not_recorded_is_said(tmp_path):
    found, outcomes = check(tmp_path / "run", plant(role="exp_avg", slot=MOMENTUM, drop=True))
    assert not found
    for name in (STATE, STEP):
        assert outcomes[name].exercised == 0
        assert "the momentum buffer is not recorded" in outcomes[name].skipped


@pytest.mark.parametrize("began", [0, 1])
def test_what_a_resumed_run_began_with_is_not_known(tmp_path, began):
    unseen = plant(step=0, drop=True)
    found, outcomes = check(tmp_path / "run", unseen, manifest={"config": CONFIG, "first_step": began})
    assert not found
    assert outcomes[STATE].exercised == 6  # the last step alone
    assert "momentum buffers: needs elements" in outcomes[STATE].skipped


@pytest.mark.parametrize(
    ("kind", "text"),
    [("apex.optimizers.FusedSGD", "may add weight decay"), ("muon.Muon", "Muon is not computed anew")],
)
def test_other_optimizers_are_not_judged(tmp_path, monkeypatch, kind, text):
    from mindspeed_precision.testing import fake_runs

    asked = fake_runs._effective

    def other(run, parameters):
        found = asked(run, parameters)
        for group in found["groups"]:
            group["optimizer"] = kind
        return found

    monkeypatch.setattr(fake_runs, "_effective", other)
    found, outcomes = check(tmp_path / "run", at("param", value=scaled(2)))
    assert not found
    assert text in outcomes[STEP].skipped


@pytest.mark.torch
@pytest.mark.parametrize("fault", ["", "lost", "other momentum"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_descent(tmp_path, fault, dtype):
    """``torch.optim.SGD`` itself: what it keeps is recorded, and what is taken from it is found."""
    torch = pytest.importorskip("torch")
    from mindspeed_precision.session import Session
    from mindspeed_precision.testing.recorded import UNPINNED

    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8).to(getattr(torch, dtype))
    given = {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, **given)
    rules = ", ".join(f"{{phase: {phase}, level: tensor}}" for phase in ("init", "clip", "optimizer"))
    kept = [f"capture.rules=[{rules}]"]
    with Session(
        model=model, optimizer=optimizer, out=tmp_path / "run", overrides=[*UNPINNED, *kept]
    ) as session:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.rand(4, 8, dtype=getattr(torch, dtype))).square().sum().backward()
            if fault == "lost" and step == 2:
                optimizer.state[model.weight]["momentum_buffer"].zero_()
            optimizer.step()
            if fault == "other momentum" and step == 1:
                optimizer.state[model.weight]["momentum_buffer"].mul_(1.25)  # what the next step finds
            session.step()
    examination = check_run(tmp_path / "run")
    found = {f.id: f for f in examination.findings if f.id.startswith("optimizer.")}
    exercised = {o.name: o.exercised for o in examination.outcomes}
    assert (exercised[STATE], exercised[STEP]) == (6, 6)
    assert set(found) == ({STATE} if fault else set())
    if fault:
        assert (found[STATE].where.step, found[STATE].where.fqn) == (2, "weight")
    if fault == "lost":
        assert "the state was lost" in found[STATE].title
