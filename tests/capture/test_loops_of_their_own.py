"""Frameworks whose train and train_step are not Megatron's: every step is seen there, too."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mindspeed_precision.errors import PatchError
from mindspeed_precision.patching.declare import load_declarations, select
from mindspeed_precision.patching.session import PatchSession

pytestmark = pytest.mark.torch

OWN_LOOP = """
def train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator,
          valid_data_iterator, process_non_loss_data_func, config{extra}):
    for iteration in range(2):
        ARGS.curr_iteration = iteration
        losses = train_step(forward_step_func, None, model, optimizer, opt_param_scheduler, config{given})
    return losses

def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config{extra}):
    return {{"loss": 1.0}}, 0, 0.5, 0
"""


class Driver:
    """Writes down what the loop's patches tell a session."""

    context = None

    def __init__(self):
        self.seen = []

    def begin_training(self):
        self.seen.append("train")

    def begin_step(self, step):
        self.seen.append(step)

    def end_step(self):
        self.seen.append("end")


def stand_ins(monkeypatch, extra):
    """Modules in place of Megatron and MindSpeed-MM, which is not on PyPI; its loop has their signatures."""
    arguments = SimpleNamespace(curr_iteration=None)
    names = ("megatron", "megatron.core", "megatron.training", "mindspeed_mm", "mindspeed_mm.training")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.core"].__version__ = "0.12.1"
    sys.modules["megatron.training"].get_args = lambda: arguments
    loop = sys.modules["mindspeed_mm.training"]
    loop.ARGS = arguments
    text = OWN_LOOP.format(extra=f", {extra}=None" if extra else "", given=", None" if extra else "")
    exec(text, vars(loop))
    return loop


@pytest.mark.parametrize("extra", ["", "call_backs"])  # before MindSpeed-MM 2.2, and since
def test_every_step_of_mindspeed_mm_is_seen(monkeypatch, extra):
    from mindspeed_precision.capture.loop import driving

    loop, driver = stand_ins(monkeypatch, extra), Driver()
    with PatchSession(select(load_declarations(), groups=["loop_mindspeed_mm"])) as session, driving(driver):
        assert loop.train(*[None] * 8) == ({"loss": 1.0}, 0, 0.5, 0)
        session.require_healthy(at="first step")
    assert driver.seen == ["train", 0, "end", 1, "end"]


def test_a_loop_of_an_unknown_form_is_refused_by_name(monkeypatch):
    stand_ins(monkeypatch, "something_new")
    with pytest.raises(PatchError, match=r"train_step_mindspeed_mm .*something_new"):
        PatchSession(select(load_declarations(), groups=["loop_mindspeed_mm"])).install()
