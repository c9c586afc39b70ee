"""Native MindSpore loops: what is recorded, that nothing is changed by it, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Phase, Role, Verdict

mindspore = pytest.importorskip("mindspore")
from mindspore import Parameter, Tensor, mint, nn, ops  # noqa: E402

from mindspeed_precision.errors import PrecisionError  # noqa: E402
from mindspeed_precision.session import Session  # noqa: E402

pytestmark = pytest.mark.mindspore
OVERRIDES = ["determinism.enabled=false", "capture.level=tensor"]


class Net(nn.Cell):
    """Two products; the weight of the first is used twice."""

    def __init__(self):
        super().__init__()
        values = np.random.RandomState(1)
        self.weight = Parameter(Tensor(values.randn(4, 4).astype(np.float32)), name="weight")
        weight = Tensor(values.randn(2, 4).astype(np.float32))
        self.head = nn.Dense(4, 2, weight_init=weight, bias_init="zeros")

    def construct(self, x):
        return self.head(mint.matmul(mint.matmul(x, self.weight), self.weight))


def batch(number):
    return Tensor(np.random.RandomState(100 + number).randn(3, 4).astype(np.float32))


def train(net, optimizer, session=None, steps=2):
    function = mindspore.value_and_grad(lambda x: mint.sum(net(x) * net.scale), None, optimizer.parameters)
    losses = []
    for step in range(steps):
        loss, gradients = function(batch(step))
        optimizer(gradients)
        losses.append(loss.asnumpy().copy())
        if session is not None:
            session.step(loss=loss)
    return losses, {p.name: p.asnumpy().copy() for p in net.trainable_params()}


def made(optimizer):
    net = Net()
    net.scale = Tensor(np.float32(0.5))
    return net, optimizer(net.trainable_params())


OPTIMIZERS = {
    "nn.Adam": lambda parameters: nn.Adam(parameters, learning_rate=0.01),
    "experimental.AdamW": lambda parameters: mindspore.experimental.optim.AdamW(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_value_and_grad_is_recorded_and_not_changed(tmp_path, name):
    plain = train(*made(OPTIMIZERS[name]))
    net, optimizer = made(OPTIMIZERS[name])
    with Session(model=net, optimizer=optimizer, out=tmp_path / "run", overrides=OVERRIDES) as session:
        recorded = train(net, optimizer, session)
    assert [loss.tobytes() for loss in recorded[0]] == [loss.tobytes() for loss in plain[0]]
    assert {k: v.tobytes() for k, v in recorded[1].items()} == {k: v.tobytes() for k, v in plain[1].items()}
    run = load_run(tmp_path / "run")
    assert run.framework == "mindspore"
    assert run.manifest["findings"] == []
    assert run.ranks[0].complete
    found = {(r.key.phase, r.key.role) for r in run.ranks[0].records}
    assert {
        (Phase.INIT, Role.PARAM),
        (Phase.FPROP, Role.INPUT),
        (Phase.FPROP, Role.OUTPUT),
        (Phase.DGRAD, Role.GRAD_OUTPUT),
        (Phase.WGRAD, Role.WGRAD),
        (Phase.WGRAD, Role.BGRAD),
        (Phase.CLIP, Role.MAIN_GRAD),
        (Phase.OPTIMIZER, Role.HYPERPARAMETER),
        (Phase.OPTIMIZER, Role.EXP_AVG),
        (Phase.OPTIMIZER, Role.EXP_AVG_SQ),
        (Phase.OPTIMIZER, Role.PARAM),
        (Phase.LOSS, Role.LOSS),
    } <= found
    assert (Phase.ACCUMULATE, Role.MAIN_GRAD) not in found  # value_and_grad accumulates nothing


def test_dw_of_a_weight_that_is_used_twice_is_the_sum(tmp_path):
    net, optimizer = made(OPTIMIZERS["nn.Adam"])
    weight, head = net.weight.asnumpy().copy(), net.head.weight.asnumpy().copy()
    with Session(model=net, optimizer=optimizer, out=tmp_path / "run", overrides=OVERRIDES) as session:
        train(net, optimizer, session, steps=1)
    run = load_run(tmp_path / "run")
    (record,) = (r for r in run.ranks[0].records if r.key.phase is Phase.WGRAD and r.key.fqn == "weight")
    x = batch(0).asnumpy().astype(np.float64)
    grad = np.full((3, 2), 0.5) @ head  # of what the second product gives
    expected = x.T @ (grad @ weight.T) + (x @ weight).T @ grad
    found = run.ranks[0].payload(record).bits.view(np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_hyperparameters_are_those_that_were_applied(tmp_path):
    net, optimizer = made(OPTIMIZERS["nn.Adam"])
    with Session(model=net, optimizer=optimizer, out=tmp_path / "run", overrides=OVERRIDES) as session:
        train(net, optimizer, session)
    values = {
        (r.key.step, r.key.slot): r.value
        for r in load_run(tmp_path / "run").ranks[0].records
        if r.key.role is Role.HYPERPARAMETER and r.key.fqn == "weight"
    }
    assert values[0, "lr"] == pytest.approx(0.01)
    assert values[0, "beta1"] == pytest.approx(0.9)
    assert (values[0, "step"], values[1, "step"]) == (0, 1)


def test_an_evaluation_is_no_microbatch(tmp_path):
    net, optimizer = made(OPTIMIZERS["nn.Adam"])
    with Session(model=net, optimizer=optimizer, out=tmp_path / "run", overrides=OVERRIDES) as session:
        net(batch(7))
        train(net, optimizer, session, steps=1)
    assert load_run(tmp_path / "run").ranks[0].microbatches[0] == 1


class Descent(nn.Cell):
    """Plain gradient descent of one's own: in place, or by assignment."""

    def __init__(self, parameters, *, in_place):
        super().__init__()
        self.parameters, self.learning_rate, self.in_place = list(parameters), 0.01, in_place

    def construct(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if self.in_place:
                parameter.sub_(gradient * self.learning_rate)
            else:
                ops.assign(parameter, parameter - gradient * self.learning_rate)
        return True


def in_place_works():
    parameter = Parameter(Tensor(np.ones(2, np.float32)), name="probe")
    parameter.sub_(Tensor(np.ones(2, np.float32)))
    return bool((parameter.asnumpy() == 0).all())


@pytest.mark.parametrize("in_place", [True, False])
def test_arithmetic_in_place_that_leaves_its_target_is_an_optimizer_that_moves_nothing(tmp_path, in_place):
    net, optimizer = made(lambda parameters: Descent(parameters, in_place=in_place))
    with Session(model=net, optimizer=optimizer, out=tmp_path / "run", overrides=OVERRIDES) as session:
        train(net, optimizer, session)
    diagnosis = compare_runs(tmp_path / "run", tmp_path / "run")
    found = [finding.id for finding in diagnosis.findings]
    if in_place and not in_place_works():
        assert found == ["optimizer.parameters_unmoved"]
        assert diagnosis.status is not Verdict.IDENTICAL
    else:
        assert found == []
        assert diagnosis.status is Verdict.IDENTICAL


class Halves(nn.Cell):
    """Looks like an optimizer, and is called with something else."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters = parameters

    def construct(self, gradients):
        return gradients


def test_an_optimizer_that_is_called_with_something_else_is_refused(tmp_path):
    net, optimizer = made(lambda parameters: Halves(list(parameters)))
    with (
        pytest.raises(PrecisionError, match="found 1, expected 3 gradients"),
        Session(model=net, optimizer=optimizer, out=tmp_path / "run", overrides=OVERRIDES),
    ):
        optimizer((batch(0),))


def test_an_optimizer_whose_steps_cannot_be_seen_is_refused(tmp_path):
    net, _ = made(OPTIMIZERS["nn.Adam"])
    with (
        pytest.raises(
            PrecisionError, match="found function, expected an optimizer of mindspore or of Megatron"
        ),
        Session(model=net, optimizer=train, out=tmp_path / "run", overrides=OVERRIDES),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_graph_mode_and_what_is_no_cell_are_refused_before_anything_is_written(tmp_path):
    net, optimizer = made(OPTIMIZERS["nn.Adam"])
    with (
        pytest.raises(PrecisionError, match="found function, expected a module of mindspore"),
        Session(model=train, optimizer=optimizer, out=tmp_path / "run", overrides=OVERRIDES),
    ):
        pass
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        with (
            pytest.raises(PrecisionError, match="found GRAPH_MODE, expected PYNATIVE_MODE"),
            Session(model=net, optimizer=optimizer, out=tmp_path / "run", overrides=OVERRIDES),
        ):
            pass
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    assert not (tmp_path / "run").exists()


def test_dropout_of_cells_is_set_to_zero(tmp_path):
    net, optimizer = made(OPTIMIZERS["nn.Adam"])
    net.head = nn.SequentialCell(net.head, nn.Dropout(p=0.5), mint.nn.Dropout(p=0.25), nn.Dropout(0.9))
    net.set_train()
    overrides = ["determinism.zero_dropout=true", "determinism.strict=false"]
    with Session(model=net, optimizer=optimizer, out=tmp_path / "run", overrides=overrides) as session:
        train(net, optimizer, session, steps=1)
        assert (net(batch(0)).asnumpy() == net(batch(0)).asnumpy()).all()
    assert (net.head[1].p, net.head[2].p, net.head[3].keep_prob) == (0.0, 0.0, 1.0)
