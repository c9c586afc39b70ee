"""A run that begins each step with the state of its reference: same bits, sharp steps, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_precision import compare_runs, load_run
from mindspeed_precision.errors import ConfigError, IncomparableError
from mindspeed_precision.records import INIT_STEP, Role, Verdict

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

KEEPS = ("capture.rules=[{role: '*param', level: tensor}, {role: 'exp_avg*', level: tensor}]",)
LEAN = ("capture.modules=false", "capture.collectives=false")
WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def train(cpu_megatron, tmp_path_factory):
    """Return a function that trains and records four steps in this process."""
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    folder = tmp_path_factory.mktemp("forced")

    def run(*overrides: str, plant=None, steps=4, **settings) -> Path:
        out = folder / f"run{len(list(folder.iterdir()))}"
        overrides = (*LEAN, *overrides)
        record_training(TrainerSettings(**settings), out, steps=steps, plant=plant, overrides=overrides)
        return out

    return run


@pytest.fixture(scope="module")
def reference(train) -> Path:
    return train(*KEEPS)


def bits(path: Path):
    return [(r.key, r.digest.fingerprint) for r in load_run(path).ranks[0].records]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"dtype": "bf16", "distributed_optimizer": True}, id="bf16, distributed optimizer"),
        pytest.param({"dtype": "fp16"}, id="fp16", marks=pytest.mark.long),
        pytest.param(
            {"dtype": "bf16", "distributed_optimizer": True, "overlap": True},
            id="overlapped gather",
            marks=pytest.mark.long,
        ),
        pytest.param({"frozen": (f"*{WEIGHT}",), "untie": True}, id="frozen", marks=pytest.mark.long),
    ],
)
def test_a_run_forced_by_its_own_twin_has_the_same_bits(train, settings):
    free = train(*KEEPS, **settings)
    forced = train(f"reference={free}", **settings)
    assert bits(forced) == bits(free)
    states = load_run(forced).manifest["reference"]["states"]
    assert list(states) == ["0", "1", "2", "3"]
    assert len(set(states.values())) == 4
    assert compare_runs(free, forced).status is Verdict.IDENTICAL


def wrong_rows(steps):
    """Eight rows of dW of one weight are wrong, in some steps."""

    def plant(trainer):
        weight = trainer.model[0].module.get_submodule(WEIGHT.removesuffix(".weight")).weight

        def spoilt(grad):
            changed = grad.clone()
            changed[40:48] = grad[40:48].flip(0)
            return changed if trainer.step in steps else grad

        weight.register_hook(spoilt)

    return plant


def diverged_steps(diagnosis):
    return {c.key.step for c in diagnosis.comparisons if c.verdict is Verdict.DIVERGED}


def origins(diagnosis):
    return {(o.key.step, o.key.fqn, o.key.role) for o in diagnosis.origins}


def test_a_fault_of_one_step_stays_in_that_step(train, reference):
    free = compare_runs(reference, train(plant=wrong_rows({1})))
    assert diverged_steps(free) == {1, 2, 3}
    forced = compare_runs(reference, train(f"reference={reference}", plant=wrong_rows({1})))
    assert diverged_steps(forced) == {1}
    assert origins(forced) == {(1, WEIGHT, Role.WGRAD)}
    assert f"took weights and optimizer state from {reference} before steps 0-3" in "\n".join(forced.notes)


@pytest.mark.long
def test_a_fault_of_every_step_is_an_origin_in_every_step(train, reference):
    forced = compare_runs(reference, train(f"reference={reference}", plant=wrong_rows(range(4))))
    assert origins(forced) == {(step, WEIGHT, Role.WGRAD) for step in range(4)}


def elsewhere(trainer):
    for parameter in trainer.named_parameters().values():
        parameter.data.mul_(1.5)


@pytest.mark.long
def test_other_weights_and_moments_are_replaced(train, reference):
    """A candidate that begins elsewhere, or whose own updates are wrong, still computes each step right."""
    forced = compare_runs(reference, train(f"reference={reference}", plant=elsewhere))
    assert {c.verdict for c in forced.comparisons if c.key.step == INIT_STEP} == {Verdict.IDENTICAL}
    assert forced.status is Verdict.IDENTICAL


def undone_updates(trainer):
    """Parameters are after each update what they were before it."""
    from mindspeed_precision.capture.optimizer_members import members

    inner, kept = members(trainer.optimizer)[-1], []
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    inner.register_step_pre_hook(lambda *_: kept.extend(p.detach().clone() for p in parameters))

    def undo(*_):
        for parameter in reversed(parameters):
            parameter.data.copy_(kept.pop())

    inner.register_step_post_hook(undo)


@pytest.mark.long
def test_updates_that_are_undone_are_seen_in_every_step(train, reference):
    """What a step began with is the reference's, which moved: not what the run itself had made of it."""
    diagnosis = compare_runs(reference, train(f"reference={reference}", plant=undone_updates))
    assert {c.key.role for c in diagnosis.comparisons if c.verdict is Verdict.DIVERGED} == {Role.PARAM}
    assert {o.key.step for o in diagnosis.origins} == {0, 1, 2, 3}
    (finding,) = [f for f in diagnosis.findings if f.id == "optimizer.parameters_unmoved"]
    assert "candidate" in " ".join((finding.title, *finding.evidence))


@pytest.mark.long
def test_chosen_steps_of_a_reference_that_kept_chosen_states(train):
    some = train(KEEPS[0].replace("level", "steps: '1-2', level"))
    forced = train(f"reference={some}", "steps='2-3'", plant=elsewhere)
    diagnosis = compare_runs(some, forced)
    assert diagnosis.status is Verdict.IDENTICAL
    assert diagnosis.steps == (2, 3)
    assert "initial parameters not compared: the state before step 2 was loaded" in diagnosis.notes
    with pytest.raises(ConfigError) as caught:
        train(f"reference={some}")
    assert "the state in its initial parameters cannot be taken from this run" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        train(f"reference={some}", "steps='1-3'")
    assert "the state before step 1 cannot be taken from this run: it did not keep the elements of" in str(
        caught.value
    )
    assert "or leave step 1 out" in str(caught.value)


@pytest.mark.long
def test_steps_beyond_the_reference_run_freely_and_are_not_compared(train, reference):
    longer = train(f"reference={reference}", steps=5)
    diagnosis = compare_runs(reference, longer)
    assert diagnosis.status is Verdict.IDENTICAL
    assert "step 4 is whole in the candidate only: not compared" in diagnosis.notes
    with pytest.raises(ConfigError, match=r"records no step that its reference recorded.*0, 1, 2, 3"):
        train(f"reference={reference}", "steps='7'", steps=8)


def test_a_state_of_a_third_run_is_not_compared(train, reference):
    forced = train(f"reference={reference}")
    other = train(*KEEPS, seed=99)
    with pytest.raises(IncomparableError) as caught:
        compare_runs(other, forced)
    assert "began with the state of another run" in str(caught.value)
    assert str(reference) in str(caught.value)
    assert compare_runs(forced, train(f"reference={reference}")).status is Verdict.IDENTICAL


def test_what_cannot_be_loaded_is_refused_before_training(train, reference):
    with pytest.raises(ConfigError, match=r"did not record exp_avg of|did not record .*exp_avg"):
        train(f"reference={train(*dropping('exp_avg'))}")
    with pytest.raises(ConfigError, match="took the state of its steps from another run"):
        train(f"reference={train(f'reference={reference}')}")
    with pytest.raises(ConfigError, match="two runs to begin with"):
        train(f"reference={reference}", f"init_from={reference}")
    with pytest.raises(IncomparableError, match="is of another kind"):
        train(f"reference={reference}", hidden=64)


def dropping(role):
    rules = [
        {"role": "*param", "level": "tensor"},
        {"role": "exp_avg*", "level": "tensor"},
        {"role": role, "level": "drop"},
    ]
    return (f"capture.rules={json.dumps(rules)}",)
