"""An error of ours inside a MindSpore training ends the capture, which is said once; training goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter
from mindspeed_precision.records import INIT_STEP

mindspore = pytest.importorskip("mindspore")
from mindspore import Tensor, mint, nn  # noqa: E402

from mindspeed_precision.backends import mindspore_capture  # noqa: E402
from mindspeed_precision.capture import clock, coverage, optimizer  # noqa: E402
from mindspeed_precision.record.recorder import Recorder  # noqa: E402
from mindspeed_precision.session import Session  # noqa: E402

pytestmark = pytest.mark.mindspore

STEPS, VICTIM = 3, 1
PLACES = {
    "before a cell": (clock.Clock, "enter"),
    "after a cell": (clock.Clock, "leave"),
    "a gradient that arrives": (coverage.CoverageWitness, "saw_wgrad"),
    "before the optimizer": (optimizer, "observe_reduced_grads"),
    "the site of a record": (Recorder, "site"),
    "the end of a step": (Recorder, "end_step"),
    "a line": (RankWriter, "write_lines"),
}


class OurError(Exception):
    """What is planted in our code."""


class TheirError(Exception):
    """What the user's code raises."""


class Net(nn.Cell):
    """A product and a layer, which may raise."""

    def __init__(self, error=None):
        super().__init__()
        values = np.random.RandomState(1)
        self.head = nn.Dense(
            4, 2, weight_init=Tensor(values.randn(2, 4).astype(np.float32)), bias_init="zeros"
        )
        self.error, self.step = error, 0

    def construct(self, x):
        if self.error is not None and self.step == VICTIM:
            raise self.error
        return self.head(mint.matmul(x, mint.transpose(x, 0, 1)) * x if x.shape[0] == x.shape[1] else x)


def train(out=None, error=None):
    """Return the bits of losses and parameters."""
    net = Net(error)
    adam = nn.Adam(net.trainable_params(), learning_rate=0.01)
    function = mindspore.value_and_grad(lambda x: mint.sum(net(x)), None, adam.parameters)

    def steps(session=None):
        losses = []
        for step in range(STEPS):
            net.step = step
            loss, gradients = function(
                Tensor(np.random.RandomState(100 + step).randn(4, 4).astype(np.float32))
            )
            adam(gradients)
            losses.append(loss.asnumpy().tobytes())
            if session is not None:
                session.step(loss=loss)
        return losses, [parameter.asnumpy().tobytes() for parameter in net.trainable_params()]

    if out is None:
        return steps()
    overrides = ["determinism.enabled=false", "write_queue_mib=0"]
    with Session(model=net, optimizer=adam, out=out, overrides=overrides) as session:
        return steps(session)


def ended(text):
    return [line for line in text.splitlines() if "capture ends here, training goes on" in line]


@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_and_what_was_whole_stays(tmp_path, monkeypatch, capfd, place):
    from mindspeed_precision.capture import context

    owner, name = PLACES[place]
    original, raised = getattr(owner, name), []
    plain = train()

    def broken(*args, **kwargs):
        if context._active and context._active[-1].recorder.step == VICTIM:
            raised.append(name)
            raise OurError(f"planted in {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    assert train(tmp_path / "run") == plain
    assert raised
    (line,) = ended(capfd.readouterr().err)
    assert f"OurError: planted in {name}" in line
    run = load_run(tmp_path / "run")
    assert not run.ranks[0].complete
    assert run.ranks[0].steps == (INIT_STEP, 0)
    (finding,) = [one for one in run.manifest["findings"] if one["id"] == "coverage.capture_ended"]
    assert f"planted in {name}" in finding["title"]


class Broken:
    """Takes the place of what the wrapper of a product looks at first."""

    def __getattr__(self, name):
        raise OurError("planted in the patch") if name == "observe" else AttributeError(name)


def test_a_patch_that_fails(tmp_path, monkeypatch, capfd):
    """The wrapper of a matrix product; the product is computed once, by MindSpore."""
    plain = train()
    monkeypatch.setattr(mindspore_capture, "_local", Broken())
    assert train(tmp_path / "run") == plain
    (line,) = ended(capfd.readouterr().err)
    assert "OurError: planted in the patch (in the patch " in line
    assert not load_run(tmp_path / "run").ranks[0].complete


def test_a_healthy_training_is_sealed(tmp_path, capfd):
    assert train(tmp_path / "run") == train()
    assert ended(capfd.readouterr().err) == []
    run = load_run(tmp_path / "run")
    assert run.ranks[0].complete
    assert run.manifest["findings"] == []


def test_an_error_of_the_user_passes_as_it_is(tmp_path):
    """In a process of its own: MindSpore's tape does not recover from what is raised while it records."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "theirs"
    assert ended(done.stderr) == []
    assert set(load_run(tmp_path / "run").ranks[0].steps) <= {INIT_STEP, 0}


if __name__ == "__main__":
    given = TheirError("theirs")
    try:
        train(Path(sys.argv[1]), given)
    except TheirError as caught:
        sys.stdout.write(f"{caught}\n" if caught is given else "another error\n")
