"""Observers change no bit: losses, norms and parameters with capture on and off are equal.

Two processes are in ``test_wgrad_coverage.py``: one run shows both.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


ALONE = {
    "fp32": {"dropout": 0.1},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "distributed optimizer": {"dtype": "bf16", "distributed_optimizer": True, "overlap": True},
    "fusion": {"dtype": "bf16", "gradient_accumulation_fusion": True},
    "recompute": {"recompute": True, "dropout": 0.1},
    "mixture": {"experts": 4},
    "untied": {"untie": True, "swiglu": True, "rmsnorm": True},
}


def bits(trainer):
    return {name: value.detach().clone() for name, value in trainer.named_parameters().items()}


CASES = {f"{name}, tensor": (options, "tensor") for name, options in ALONE.items()}
CASES["bf16, sketch"] = (ALONE["bf16"], "sketch")


@pytest.mark.parametrize(("options", "level"), CASES.values(), ids=CASES)
def test_a_run_is_the_same_when_it_is_observed(cpu_megatron, tmp_path, options, level):
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    settings = TrainerSettings(**options)
    with CpuTrainer(settings) as trainer:
        plain, before = trainer.train(2), bits(trainer)
    kept = []
    observed = record_training(
        settings, tmp_path / "run", plant=kept.append, overrides=[f"capture.level={level}"]
    )
    after = bits(kept[0])
    assert observed == plain
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


class Twice(nn.Module):
    """Uses its input twice: behind an identity at its boundary the two gradients are summed first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.cos()


class Fan(nn.Module):
    """One tensor with several consumers: how its gradient is summed shows in its bits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.twice = Twice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem(x)
        return (stem.tanh() + self.twice(stem) + stem.sigmoid()).square().sum()


def fan_gradients(observe) -> list[torch.Tensor]:
    torch.manual_seed(1234)
    model = Fan()
    x = torch.randn(64, 32)
    with observe(model):
        model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


class FullBackwardHooks:
    def __init__(self, model: nn.Module) -> None:
        for module in model.modules():
            module.register_full_backward_hook(lambda *_: None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_a_tensor_with_several_consumers_keeps_its_gradient(tmp_path: Path):
    from contextlib import nullcontext

    from mindspeed_precision import Session
    from mindspeed_precision.testing.recorded import UNPINNED

    def observed(model):
        return Session(model=model, out=tmp_path / "fan", overrides=UNPINNED)

    with pytest.raises(Exception, match="no training step was seen"):
        fan_gradients(observed)  # no step ended, which is reported; the hooks were on all the same
    plain = fan_gradients(lambda model: nullcontext())

    def observed_and_ended(model):
        return _Stepping(Session(model=model, out=tmp_path / "fan2", overrides=UNPINNED))

    seen = fan_gradients(observed_and_ended)
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


def test_full_backward_hooks_would_not_be_neutral_here():
    """The test above can fail: with torch's own full backward hooks this very net changes its bits."""
    from contextlib import nullcontext

    plain = fan_gradients(lambda model: nullcontext())
    hooked = fan_gradients(FullBackwardHooks)
    assert not all(torch.equal(one, other) for one, other in zip(plain, hooked, strict=True))


class _Stepping:
    def __init__(self, session) -> None:
        self._session = session

    def __enter__(self):
        return self._session.__enter__()

    def __exit__(self, *error):
        self._session.step()
        return self._session.__exit__(*error)
