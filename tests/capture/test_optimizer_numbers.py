"""The same hyperparameter is the same record, wherever and in whatever form an optimizer keeps it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from mindspeed_precision import compare_runs, load_run  # noqa: E402
from mindspeed_precision.session import Session  # noqa: E402
from mindspeed_precision.testing.recorded import UNPINNED  # noqa: E402

pytestmark = pytest.mark.torch


class CountsInGroup(torch.optim.SGD):
    """Counts its steps in an int of the group, as MindSpeed's and apex' Adam do."""

    first = 0

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", self.first) + 1


class CountsInState(CountsInGroup):
    """Counts its steps in a tensor of each parameter's state, as torch's Adam does."""

    def step(self, closure=None):
        torch.optim.SGD.step(self, closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", torch.tensor(float(self.first))) + 1


class StartsAtOne(CountsInState):
    """A bias correction that is off by one."""

    first = 1


def record(out, kind, lr):
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=lr)
    with Session(model=model, optimizer=optimizer, out=out, overrides=UNPINNED) as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            session.step()
    return load_run(out)


def test_a_step_counted_by_an_int_and_by_a_tensor_is_the_same_step(tmp_path):
    number = record(tmp_path / "group", CountsInGroup, 0.125)
    tensor = record(tmp_path / "state", CountsInState, torch.tensor(0.125))
    assert compare_runs(number, tensor).status.value == "identical"


def test_another_step_is_still_another_step(tmp_path):
    number = record(tmp_path / "group", CountsInGroup, 0.125)
    other = record(tmp_path / "state", StartsAtOne, 0.125)
    first = compare_runs(number, other).first_divergence.key
    assert (first.role.value, first.slot, first.step) == ("hyperparameter", "step", 1)
