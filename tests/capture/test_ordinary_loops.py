"""Loops that are no Megatron: what they do must neither crash nor look like a gap."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from mindspeed_precision import check_run, compare_runs, load_run  # noqa: E402
from mindspeed_precision.errors import ConfigError  # noqa: E402
from mindspeed_precision.records import Phase, Role  # noqa: E402
from mindspeed_precision.session import Session  # noqa: E402
from mindspeed_precision.testing.recorded import UNPINNED  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def record(tmp_path):
    """Record ``steps`` calls of a step function and return the run that was written."""

    def run(model, optimizer, step, *, steps=2, overrides=()):
        out = tmp_path / "run"
        options = [*UNPINNED, *overrides]
        with Session(model=model, optimizer=optimizer, out=out, overrides=options) as session:
            for _ in range(steps):
                step()
                session.step()
        return load_run(out)

    return run


def found(run, phase, role, fqn):
    return [
        (record, run.ranks[0].payload(record).bits)
        for record in run.ranks[0].records
        if (record.key.phase, record.key.role, record.key.fqn) == (phase, role, fqn)
    ]


DTYPES = {"float64": torch.float64, "complex64": torch.complex64, "bfloat16": torch.bfloat16}


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_gradients_of_any_type_have_a_norm(record, dtype):
    model = nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=dtype)).abs().sum().backward()
        squares = sum(p.grad.abs().double().square().sum() for p in model.parameters())
        norms.append(float(squares.sqrt()))
        optimizer.step()

    run = record(model, optimizer, step)
    recorded = [r.value for r in run.ranks[0].records if r.key.role is Role.GRAD_NORM]
    assert recorded == pytest.approx(norms, rel=1e-5)


def test_a_sparse_gradient_has_a_norm(record):
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.tensor([1, 1, 2])).sum().backward()  # row 1 twice: 4 times 2, row 2: 4 times 1
        optimizer.step()

    run = record(model, optimizer, step)
    recorded = [r.value for r in run.ranks[0].records if r.key.role is Role.GRAD_NORM]
    assert recorded == pytest.approx([20**0.5] * 2)
    (lost,) = [f for f in run.manifest["findings"] if f["id"] == "coverage.record_failed"]
    assert "cannot read the elements" in lost["title"]
    assert "step 0" in lost["title"]
    assert "weight" in lost["evidence"][0]


def test_the_gradient_that_leaves_a_module_that_works_in_place(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    run = record(model, None, lambda: model(torch.randn(2, 4)).sum().backward(), steps=1, overrides=TENSORS)
    (_, arrived), *_ = found(run, Phase.DGRAD, Role.GRAD_OUTPUT, "1")
    (_, left), *_ = found(run, Phase.DGRAD, Role.GRAD_INPUT, "1")
    (_, below), *_ = found(run, Phase.DGRAD, Role.GRAD_OUTPUT, "0")
    assert (left == below).all()
    assert (left != arrived).any()


class Masks(nn.Module):
    """Writes what it is given, as Megatron's attention mask does."""

    def forward(self, scores):
        scores.masked_fill_(torch.eye(4, dtype=torch.bool), -1e4)
        return scores.softmax(-1)


def test_the_gradient_of_a_view_that_a_module_writes_is_that_of_what_came_in(record):
    torch.manual_seed(0)
    linear, mask, weights = nn.Linear(4, 8), Masks(), torch.randn(2, 4, 4)
    model = nn.ModuleDict({"linear": linear, "mask": mask})
    model.forward = lambda x: mask(linear(x).view(2, 4, 4)) * weights
    run = record(model, None, lambda: model(torch.randn(4, 4)).sum().backward(), steps=1, overrides=TENSORS)
    (_, left), *_ = found(run, Phase.DGRAD, Role.GRAD_INPUT, "mask")
    (_, below), *_ = found(run, Phase.DGRAD, Role.GRAD_OUTPUT, "linear")
    assert (left.reshape(below.shape) == below).all()
    assert (left[:, range(4), range(4)] == 0).all()


TENSORS = ["capture.level=tensor"]


def test_an_input_that_is_fed_again_and_again_collects_no_hooks(record):
    model, x = nn.Sequential(nn.Identity(), nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    run = record(model, None, lambda: model(x).sum().backward(), steps=4)
    keys = [record.key for record in run.ranks[0].records]
    assert len(keys) == len(set(keys))
    assert sum(key.role is Role.GRAD_INPUT and key.fqn == "0" for key in keys) == 4
    assert not x._backward_hooks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_is_no_microbatch(record, mode):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step():
        with mode():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        with mode():
            model(torch.ones(2, 4))

    run = record(model, None, step)
    assert run.manifest["findings"] == []
    assert run.ranks[0].microbatches == {-1: 0, 0: 1, 1: 1}
    outputs = [r for r in run.ranks[0].records if r.key.role is Role.OUTPUT and r.key.fqn == ""]
    assert [r.key.step for r in outputs] == [0, 1]


@dataclass
class Answer:
    logits: torch.Tensor
    note: str = "not a tensor"


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(logits=self.linear(x))


def test_tensors_in_a_dataclass_are_seen(record):
    model = Answering()
    run = record(model, None, lambda: model(torch.ones(2, 4)).logits.sum().backward(), steps=1)
    roles = {r.key.role for r in run.ranks[0].records if (r.key.fqn, r.key.slot) == ("", "logits")}
    assert roles == {Role.OUTPUT, Role.GRAD_OUTPUT}


def test_a_model_that_is_never_in_train_mode_is_an_error_that_says_so(record):
    model = nn.Linear(4, 4).eval()
    run = record(model, None, lambda: model(torch.ones(2, 4)).sum().backward())
    (finding,) = run.manifest["findings"]
    assert finding["id"] == "coverage.no_forward"
    assert "train mode" in finding["title"]


def test_ranks_that_are_not_there_are_an_error(record):
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="ranks"):
        record(model, None, lambda: model(torch.ones(2, 4)).sum().backward(), overrides=["ranks=7"])


def test_steps_that_were_not_made_are_told_and_fail_no_training(record, capsys):
    model = nn.Linear(4, 4)

    def step():
        model(torch.ones(2, 4)).sum().backward()

    run = record(model, None, step, overrides=["steps=50-60"])
    (told,) = run.manifest["findings"]
    assert told["id"] == "coverage.no_step_recorded"
    assert "the training made steps 0 to 1, and steps=50-60" in told["title"]
    assert capsys.readouterr().err.count("none of the 2 steps was recorded") == 1
    found = {finding.id: finding for finding in check_run(run).findings}
    assert found["coverage.no_step_recorded"].severity.value == "warning"
    assert "vacuous.no_records" in found


def test_steps_that_were_made_are_no_finding(record, capsys):
    model = nn.Linear(4, 4)
    run = record(model, None, lambda: model(torch.ones(2, 4)).sum().backward(), overrides=["steps=1-60"])
    assert run.manifest["findings"] == []
    assert "none of" not in capsys.readouterr().err


def test_a_rule_that_matches_nothing_is_named(record, tmp_path):
    model = nn.Linear(4, 4)
    rules = "[{fqn: layrs.*}, {fqn: weight, role: wgrad}]"
    run = record(
        model, None, lambda: model(torch.ones(2, 4)).sum().backward(), overrides=[f"capture.rules={rules}"]
    )
    (finding,) = [f for f in compare_runs(run, run).findings if f.id == "coverage.rule_without_match"]
    assert all("fqn=layrs.*" in line for line in finding.evidence)
    assert len(finding.evidence) == 2  # one per run
