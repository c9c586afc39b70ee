"""An error in our own code, in each place that runs inside a training: it goes on, and is as it was."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mindspeed_precision import recording  # noqa: E402
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
from mindspeed_precision.capture.containment import Containment  # noqa: E402
from mindspeed_precision.capture.context import CaptureContext  # noqa: E402
from mindspeed_precision.dump.reader import load_run  # noqa: E402
from mindspeed_precision.dump.writer import RankWriter  # noqa: E402
from mindspeed_precision.errors import ConfigError, DumpError  # noqa: E402
from mindspeed_precision.record.recorder import Recorder  # noqa: E402
from mindspeed_precision.records import INIT_STEP  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]

FAST = {
    *("before a module", "what a gradient is", "a linear's backward", "a GEMM, after", "a collective"),
    *("inside the optimizer", "a batch", "the beginning of a step", "the writer's thread"),
}
"""Places that are tried each time; the others with the matrix."""

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
    "the beginning of a step": (recording, "observe_random_states", PLAIN),
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
    """Let ``owner.name`` raise while ``when(*args)`` is true; return what counts the errors."""
    original, raised = getattr(owner, name), []

    def broken(*args, **kwargs):
        if when(*args):
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
    return [
        line
        for line in text.splitlines()
        if re.match(r"mindspeed-precision: (?!recording |recorded |stopped by |next: )", line)
    ]


@pytest.mark.parametrize(
    "place", [place if place in FAST else pytest.param(place, marks=pytest.mark.matrix) for place in PLACES]
)
def test_training_goes_on_and_what_was_whole_stays(trained, tmp_path, monkeypatch, capfd, place):
    owner, name, options = PLACES[place]
    plain, before = trained(options)
    step = step_of_the_run()
    in_the_thread = name == "_write_lines"  # which may be behind the training
    raised = break_at(
        monkeypatch,
        owner,
        name,
        when=lambda *args: (f'"step":{VICTIM},'.encode() in args[1]) if in_the_thread else step() == VICTIM,
    )
    results, trainer = observed(options, tmp_path / "run")
    assert raised
    assert results == plain
    assert same(parameters(trainer), before)
    (line,) = our_lines(capfd.readouterr().err)
    assert f"OurError: planted in {name}" in line
    assert "training goes on" in line
    run = load_run(tmp_path / "run")
    assert not run.ranks[0].complete
    assert run.ranks[0].steps == (INIT_STEP, 0)
    (finding,) = [one for one in run.manifest["findings"] if one["id"] == "coverage.capture_ended"]
    assert f"planted in {name}" in finding["title"]
    assert any("test_own_failures.py" in frame for frame in finding["evidence"])


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (recording, "observe_parameters", "the start"),
        (recording, "_manifest", "before the run is there"),
        (recording, "update_manifest", "the end of the first step"),
        (RankWriter, "close", "the end"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_failure_outside_of_the_steps(trained, tmp_path, monkeypatch, capfd, owner, name, when):
    plain, before = trained(PLAIN)
    raised = break_at(monkeypatch, owner, name, when=lambda *_: True)
    results, trainer = observed(PLAIN, tmp_path / "run")
    assert raised
    assert results == plain
    assert same(parameters(trainer), before)
    assert len(our_lines(capfd.readouterr().err)) == 1
    assert not list(tmp_path.rglob("COMPLETE"))
    if when.startswith("the end"):  # what was complete
        assert len(load_run(tmp_path / "run").ranks[0].steps) == (STEPS + 1 if when == "the end" else 2)


def test_a_healthy_run_says_nothing_and_is_sealed(trained, tmp_path, capfd):
    plain, _ = trained(PLAIN)
    results, _ = observed(PLAIN, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert results == plain
    assert our_lines(capfd.readouterr().err) == []
    assert run.ranks[0].complete
    assert run.manifest["findings"] == []


def test_what_refuses_at_the_start_is_still_an_error(trained, tmp_path):
    trained(PLAIN)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "yours").write_text("")
    with pytest.raises(DumpError, match="not empty"):
        observed(PLAIN, tmp_path / "run")
    with pytest.raises(ConfigError, match="no rank of this run records"):
        observed(PLAIN, tmp_path / "other", overrides=["ranks='7'"])


class TheirError(Exception):
    """What the user's code raises."""


def in_the_data(trainer, error):
    batches = iter(trainer._data)

    def some():
        yield next(batches)
        raise error

    trainer._data = some()


def in_the_forward_step(trainer, error):
    original = trainer.forward_step

    def forward_step(*args):
        if trainer.step == VICTIM:
            raise error
        return original(*args)

    trainer.forward_step = forward_step


def in_the_loss(trainer, error):
    original = trainer.forward_step

    def forward_step(*args):
        output, loss = original(*args)

        def broken(*given):
            if trainer.step == VICTIM:
                raise error
            return loss(*given)

        return output, broken

    trainer.forward_step = forward_step


def in_a_module(trainer, error):
    def refuse(*_):
        if trainer.step == VICTIM:
            raise error

    next(
        module for module in trainer.model[0].modules() if type(module).__name__ == "MLP"
    ).register_forward_hook(refuse)


def in_the_backward(trainer, error):
    def refuse(_):
        if trainer.step == VICTIM:
            raise error

    next(iter(trainer.named_parameters().values())).register_hook(refuse)


def in_the_optimizer(trainer, error):
    def refuse(*_):
        if trainer.step == VICTIM:
            raise error

    trainer.optimizer.chained_optimizers[0].optimizer.register_step_pre_hook(refuse) if hasattr(
        trainer.optimizer, "chained_optimizers"
    ) else trainer.optimizer.optimizer.register_step_pre_hook(refuse)


@pytest.mark.parametrize(
    "place",
    [in_the_data, in_the_forward_step, in_the_loss, in_a_module, in_the_backward, in_the_optimizer],
    ids=lambda place: place.__name__,
)
def test_an_error_of_the_user_passes_as_it_is(cpu_megatron, tmp_path, capfd, place):
    error = TheirError("theirs", 7)
    with pytest.raises(TheirError) as caught:
        observed(PLAIN, tmp_path / "run", plant=lambda trainer: place(trainer, error))
    assert caught.value is error
    assert error.args == ("theirs", 7)
    assert error.__cause__ is None
    assert error.__context__ is None
    assert our_lines(capfd.readouterr().err) == []  # nothing of ours failed
    run = load_run(tmp_path / "run")
    assert not run.ranks[0].complete
    assert set(run.ranks[0].steps) <= {INIT_STEP, 0}
    assert "coverage.capture_ended" not in str(run.manifest["findings"])


def test_an_error_of_the_user_passes_also_where_ours_fails_on_its_way(cpu_megatron, tmp_path, monkeypatch):
    """The user's function raises, and then our clean-up behind it does: theirs is what is seen."""
    error = TheirError("theirs")

    def wrapper(wrapped, instance, args, kwargs):
        try:
            return wrapped(*args, **kwargs)
        finally:
            raise OurError("ours")

    def theirs():
        raise error

    containment = Containment()
    with pytest.raises(TheirError) as caught:
        containment.call("here", wrapper, theirs, None, (), {})
    assert caught.value is error
    assert containment.failure.error == "OurError: ours"


def test_a_wrapped_function_is_called_once_and_its_result_is_its_own():
    calls, results = [], [object(), object(), object()]

    def theirs(number):
        calls.append(number)
        return results[number]

    def before(wrapped, instance, args, kwargs):
        raise OurError("before")

    def after(wrapped, instance, args, kwargs):
        wrapped(*args, **kwargs)
        raise OurError("after")

    def healthy(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    said = []
    containment = Containment(said.append)
    for number, wrapper in enumerate((before, after, healthy)):
        assert containment.call("here", wrapper, theirs, None, (number,), {}) is results[number]
    assert calls == [0, 1, 2]
    assert [failure.error for failure in said] == ["OurError: before"]


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(0)])
def test_what_ends_the_process_passes(ending):
    def wrapper(wrapped, instance, args, kwargs):
        raise ending

    with pytest.raises(type(ending)):
        Containment().call("here", wrapper, lambda: None, None, (), {})


def test_an_error_that_a_loop_catches_keeps_no_tensor_alive():
    """A loop that lives on after running out of memory must get it back."""

    def theirs():
        kept = Kept()
        alive.append(weakref.ref(kept))
        raise TheirError

    def wrapper(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    alive: list = []
    gc.disable()
    try:
        with contextlib.suppress(TheirError):
            Containment().call("here", wrapper, theirs, None, (), {})
        assert alive[0]() is None
    finally:
        gc.enable()


class Kept:
    """What a frame holds."""
