"""Real trainings of megatron-core: an operation that does not repeat, and states that a resume loses."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.certify import certify_runs
from mindspeed_precision.session import Session

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

LONG = pytest.mark.long
HALF = 2
LINEAR = "decoder.layers.1.mlp.linear_fc2"
CHUNKS = 16


@pytest.fixture(scope="module")
def settings(cpu_megatron):
    from mindspeed_precision.testing.trainer import TrainerSettings

    return TrainerSettings(dropout=0.1)


def train(settings, out, *, steps, plant=None, first_step=0, begin=None, end=None):
    """Record ``steps`` steps; ``begin`` and ``end`` are called with the trainer."""
    from mindspeed_precision.testing.recorded import UNPINNED
    from mindspeed_precision.testing.trainer import CpuTrainer

    with CpuTrainer(settings) as trainer:
        trainer.scheduler.lr_decay_style, trainer.scheduler.lr_decay_steps = "cosine", 8
        for group in trainer.optimizer.param_groups:
            group["min_lr"] = 0.0
        if plant is not None:
            plant(trainer)
        if begin is not None:
            begin(trainer)
        with Session(
            model=trainer.model,
            optimizer=trainer.optimizer,
            out=out,
            overrides=UNPINNED,
            first_step=first_step,
        ) as session:
            trainer.forward_step = session.forward_step(trainer.forward_step)
            for _ in range(steps):
                session.step(loss=trainer.train_one_step().loss)
        if end is not None:
            end(trainer)
    return out


def state_of(trainer):
    """Return what a checkpoint of Megatron holds, by the real ``state_dict`` of each part."""
    import torch
    from megatron.core import tensor_parallel

    return copy.deepcopy(
        {
            "model": [chunk.state_dict() for chunk in trainer.model],
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.scheduler.state_dict(),
            "random": (
                random.getstate(),
                np.random.get_state(),
                torch.get_rng_state(),
                tensor_parallel.get_cuda_rng_tracker().get_states(),
            ),
        }
    )


def load(trainer, state, *, lose=()):
    """Go on from a checkpoint, but for what a fault loses."""
    import torch
    from megatron.core import tensor_parallel

    state = copy.deepcopy(state)  # an optimizer goes on in the very tensors that it is given
    for chunk, saved in zip(trainer.model, state["model"], strict=True):
        chunk.load_state_dict(saved)
    if "optimizer" not in lose:
        trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.optimizer.reload_model_params()
    trainer.scheduler.load_state_dict(state["scheduler"])
    if "schedule" in lose:
        trainer.scheduler.step(increment=1)
    if "data" not in lose:
        for _ in range(HALF * trainer.settings.microbatches):
            next(trainer._data)
    if "random" not in lose:
        python, numpy_state, torch_state, tracker = state["random"]
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        tensor_parallel.get_cuda_rng_tracker().set_states(tracker)


@pytest.fixture(scope="module")
def parts(settings, tmp_path_factory):
    """The whole training, its first half, and what its checkpoint held."""
    directory = tmp_path_factory.mktemp("parts")
    kept = {}
    full = train(settings, directory / "full", steps=2 * HALF)
    first = train(settings, directory / "first", steps=HALF, end=lambda t: kept.update(state_of(t)))
    return full, first, kept


def resumed(settings, parts, out, *, lose=()):
    full, first, state = parts
    second = train(
        settings, out, steps=HALF, first_step=HALF, begin=lambda trainer: load(trainer, state, lose=lose)
    )
    return certify_runs(full, first, second)


def test_a_whole_resume_is_certified(settings, parts, tmp_path):
    certificate = resumed(settings, parts, tmp_path / "resumed")
    assert certificate.certified, certificate.statement
    assert (certificate.through, certificate.resumed_at) == (2 * HALF - 1, HALF)


@pytest.mark.parametrize(
    ("lost", "id_", "role", "slot"),
    [
        ("random", "determinism.resume_random_state", "rng", None),
        ("optimizer", "determinism.resume_optimizer", "hyperparameter", "step"),
        pytest.param("schedule", "determinism.resume_schedule", "hyperparameter", None, marks=LONG),
        pytest.param("data", "determinism.resume_data", "batch", None, marks=LONG),
    ],
)
def test_what_a_resume_loses_is_named(settings, parts, tmp_path, lost, id_, role, slot):
    certificate = resumed(settings, parts, tmp_path / "resumed", lose=[lost])
    assert not certificate.certified
    assert certificate.through == HALF - 1
    first = certificate.findings[0]
    assert (first.id, first.where.step, first.where.role.value) == (id_, HALF, role)
    assert slot is None or slot in {key.slot for key in first.explains}


def test_a_run_that_loads_nothing_is_said_to(settings, parts, tmp_path):
    full, first, _ = parts
    again = train(settings, tmp_path / "again", steps=HALF)
    certificate = certify_runs(full, first, again)
    assert not certificate.certified
    assert certificate.findings[0].id == "determinism.resume_not_loaded"


def summed_in_pieces(direction, *, shuffled):
    """Return a plant: a linear that adds pieces of a product as atomics would: in any order."""

    def plant(trainer):
        import torch

        def order():
            return np.random.default_rng().permutation(CHUNKS) if shuffled else range(CHUNKS)

        def product(one, two):
            pieces = list(zip(one.chunk(CHUNKS, dim=-1), two.chunk(CHUNKS, dim=0), strict=True))
            total = torch.zeros(*one.shape[:-1], two.shape[-1])
            for number in order():
                total = total + pieces[number][0] @ pieces[number][1]
            return total

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return product(x, weight.t()) if direction == "forward" else x @ weight.t()

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                into = product(grad, weight) if direction == "backward" else grad @ weight
                return into, grad.flatten(0, -2).t() @ x.flatten(0, -2)

        linear = dict(trainer.model[0].module.named_modules())[LINEAR]
        linear.forward = lambda x: (Linear.apply(x, linear.weight), linear.bias)

    return plant


@pytest.fixture(scope="module")
def quiet(settings):
    return replace(settings, dropout=0.0)


@pytest.mark.parametrize(
    ("direction", "role"),
    [("forward", "output"), pytest.param("backward", "grad_input", marks=LONG)],
)
def test_an_operation_that_sums_in_any_order_is_named(quiet, tmp_path, direction, role):
    plant = summed_in_pieces(direction, shuffled=True)
    runs = [train(quiet, tmp_path / name, steps=2, plant=plant) for name in ("one", "two")]
    certificate = certify_runs(*runs)
    assert not certificate.certified
    first = certificate.findings[0]
    assert (first.id, first.where.step, first.where.microbatch) == ("determinism.operation", 0, 0)
    assert (first.where.fqn, first.where.role.value) == (LINEAR, role)


def test_the_same_in_a_fixed_order_is_certified(quiet, tmp_path):
    plant = summed_in_pieces("forward", shuffled=False)
    runs = [train(quiet, tmp_path / name, steps=2, plant=plant) for name in ("one", "two")]
    assert certify_runs(*runs).certified
