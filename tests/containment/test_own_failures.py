"""An error in our own code, in each place that runs inside a training: it goes on, and is as it was."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mindspeed_precision.capture import (  # noqa: E402
    batch,
    between_steps,
    clock,
    collectives,
    coverage,
    gradients,
    optimizer,
    wgrad,
)
from mindspeed_precision.capture.context import CaptureContext  # noqa: E402
from mindspeed_precision.dump.reader import load_run  # noqa: E402
from mindspeed_precision.dump.writer import RankWriter  # noqa: E402
from mindspeed_precision.record.recorder import Recorder  # noqa: E402
from mindspeed_precision.records import INIT_STEP, Phase  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]

STEPS = 3
VICTIM = 1
PLAIN = {"dtype": "bf16", "dropout": 0.1}
FUSED = {"dtype": "bf16", "dropout": 0.1, "gradient_accumulation_fusion": True}
OVERLAPPED = {"dtype": "bf16", "dropout": 0.1, "distributed_optimizer": True, "overlap": True}


class OurError(Exception):
    """What nobody foresaw."""


# place in our code, options of the training
PLACES = {
    "before a module": (clock.Clock, "enter", PLAIN),
    "after a module": (clock.Clock, "leave", PLAIN),
    "what a gradient is": (CaptureContext, "_part", PLAIN),
    "the site of a record": (Recorder, "site", PLAIN),
    "a gradient that arrives": (coverage.CoverageWitness, "saw_wgrad", PLAIN),
    "main_grad": (gradients, "observe_main_grad", PLAIN),
    "main_grad before an overlapped reduction": (gradients, "_added_in_the_gemm", OVERLAPPED),
    "a linear's forward": (wgrad, "_Weight", PLAIN),
    "a linear's backward": (wgrad, "_GemmWitness", PLAIN),
    "a GEMM, before": (wgrad, "observe_operands", PLAIN),
    "a GEMM, after": (wgrad, "verify_product", PLAIN),
    "a fused GEMM, before": (wgrad, "_parameter_of", FUSED),
    "a fused GEMM, after": (wgrad, "verify_product", FUSED),
    "a collective": (collectives, "_observe", PLAIN),
    "before the optimizer": (optimizer, "observe_reduced_grads", PLAIN),
    "inside the optimizer": (optimizer, "_named", PLAIN),
    "after the optimizer": (optimizer, "observe_grad_norm", PLAIN),
    "the schedule": (clock.Clock, "count_schedule_step", PLAIN),
    "a forward step": (clock.Clock, "announce_forward", PLAIN),
    "before a batch": (batch._SampleJournal, "mark", PLAIN),
    "a batch": (batch.ObservedIterator, "_observe", PLAIN),
    "a loss function": (batch, "_observed_loss", PLAIN),
    "generators": (between_steps.BetweenSteps, "begin_step", PLAIN),
    "the beginning of a step": (Recorder, "begin_step", PLAIN),
    "the end of a step": (Recorder, "end_step", PLAIN),
    "a line": (RankWriter, "write_lines", PLAIN),
    "the writer's thread": (RankWriter, "_write_lines", PLAIN),
}


@pytest.fixture(scope="module")
def trained(cpu_megatron):
    """Return a function that gives what a training says when nobody looks, by its options; trained once."""
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    known = {}

    def train(options):
        key = repr(options)
        if key not in known:
            with CpuTrainer(TrainerSettings(**options)) as trainer:
                known[key] = trainer.train(STEPS), parameters(trainer)
        return known[key]

    return train


def parameters(trainer):
    return {name: value.detach().clone() for name, value in trainer.named_parameters().items()}


def observed(options, out: Path, overrides=(), plant=None):
    """Train while observed; return what the training says, and the trainer, which is closed."""
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    kept = []

    def keep(trainer):
        kept.append(trainer)
        if plant is not None:
            plant(trainer)

    results = record_training(
        TrainerSettings(**options), out, steps=STEPS, plant=keep, overrides=list(overrides)
    )
    return results, kept[0]


def break_at(monkeypatch, owner, name, *, when):
    """Let ``owner.name`` raise from the moment that ``when()`` is true; return what counts the errors."""
    original, raised = getattr(owner, name), []

    def broken(*args, **kwargs):
        if when():
            raised.append(name)
            raise OurError(f"planted in {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    return raised


def step_of_the_run():
    """Return a function that tells which step the observed run is in; INIT_STEP before the first."""
    from mindspeed_precision.capture import context

    def step():
        return context._active[-1].recorder.step if context._active else INIT_STEP

    return step


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def our_lines(text):
    return [line for line in text.splitlines() if line.startswith("mindspeed-precision")]


@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_and_what_was_whole_stays(trained, tmp_path, monkeypatch, capfd, place):
    owner, name, options = PLACES[place]
    plain, before = trained(options)
    step = step_of_the_run()
    raised = break_at(monkeypatch, owner, name, when=lambda: step() == VICTIM)
    results, trainer = observed(options, tmp_path / "run")
    assert raised
    assert results == plain
    assert same(parameters_of_closed(trainer), before)
    (line,) = our_lines(capfd.readouterr().err)
    assert f"OurError: planted in {name}" in line
    assert "training goes on" in line
    run = load_run(tmp_path / "run")
    assert not run.ranks[0].complete
    assert run.ranks[0].steps == (INIT_STEP, 0)
    (finding,) = [one for one in run.manifest["findings"] if one["id"] == "coverage.capture_ended"]
    assert f"planted in {name}" in finding["title"]
    assert any("test_own_failures.py" in frame for frame in finding["evidence"])


def parameters_of_closed(trainer):
    return {
        name: value.detach().clone()
        for chunk in trainer.model
        for name, value in chunk.module.named_parameters()
    }
