"""The loop that stands in for ``megatron.training``: its optimizer, its place, its numbers."""

from __future__ import annotations

import numpy as np
import pytest
from preloaded import run_training

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.testing.core_loop.piece import NOTICE
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import SCRIPT
from mindspeed_precision.testing.demo.launch import run_training as launched

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


def options(**more: object) -> list[str]:
    return demo_arguments(**{"dropout": 0.0, "iterations": 3, **more})


@pytest.fixture(scope="module")
def train(megatron, tmp_path_factory):
    """Return a function that trains under a version and gives its log's text and numbers."""
    folder = tmp_path_factory.mktemp("core_loop")

    def run(name: str, *, version: str = "0.12.1", processes: int = 1, start=run_training, **more: object):
        done = start(
            SCRIPT,
            options(**more),
            processes=processes,
            megatron=megatron(version),
            log=folder / f"{name}-{version}.txt",
        )
        return done.text, [(float(row.loss), float(row.grad_norm)) for row in done.rows]

    return run


@pytest.fixture(scope="module")
def alone(train):
    return train("alone", start=launched)  # an import says what it is


def test_adamw_is_torchs_adamw():
    import torch

    from mindspeed_precision.testing.core_loop.adamw import AdamW

    def trained(optimizer_class):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5))]
        groups = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0, "lr": 2e-2}]
        optimizer = optimizer_class(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for _ in range(5):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        return optimizer, weights

    (own, weights), (reference, expected) = trained(AdamW), trained(torch.optim.AdamW)
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(own.state[weight][name], reference.state[other][name])
        assert own.state[weight]["step"] == 5


def test_adamw_leaves_alone_what_has_no_gradient_and_takes_no_closure():
    import torch

    from mindspeed_precision.testing.core_loop.adamw import AdamW

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], lr=1.0, weight_decay=0.5)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(NotImplementedError):
        optimizer.step(lambda: None)


def test_samples_are_dealt_in_blocks_as_megatrons_sampler_does():
    from mindspeed_precision.testing.core_loop.data import SequentialSampler

    ranks = [
        list(SequentialSampler(samples=9, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=2))
        for rank in range(2)
    ]
    assert ranks == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.matrix
def test_it_trains_and_says_what_it_is(alone):
    text, numbers = alone
    assert NOTICE.strip() in text
    losses = [loss for loss, _ in numbers]
    assert len(losses) == 3
    assert 4.0 < losses[-1] < losses[0] < 6.0


@pytest.mark.matrix
def test_a_version_with_a_loop_of_its_own_keeps_it(train):
    text, numbers = train("own loop", version="0.17.1", start=launched)
    assert len(numbers) == 3
    assert NOTICE.strip() not in text


@pytest.mark.matrix
def test_it_serves_the_later_wheels_without_a_loop(alone, train):
    text, numbers = train("later", version="0.16.1", start=launched)
    assert NOTICE.strip() in text
    assert numbers == alone[1]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"processes": 2}, marks=pytest.mark.long),
        pytest.param({"processes": 2, "tp": 2}, marks=pytest.mark.long),
        {"processes": 4, "tp": 2},
    ],
)
def test_every_layout_gives_the_numbers_of_one_process(layout, alone, train):
    _, numbers = train(str(layout), **layout)
    np.testing.assert_allclose(numbers, alone[1], rtol=2e-6)


@pytest.mark.matrix
def test_other_work_gives_other_numbers(alone, train):
    """The comparison above can fail: half of the batch, or another seed, is seen in what is printed."""
    for name, other in (("half", {"global_batch_size": 4}), ("seed", {"seed": 7})):
        assert not np.allclose(train(name, **other)[1], alone[1], rtol=1e-4, atol=0)


@pytest.mark.matrix
def test_what_it_cannot_do_is_named_at_once(megatron, tmp_path):
    with pytest.raises(ExternalCommandError):
        run_training(
            SCRIPT,
            options(dtype="bf16", distributed_optimizer=True, extra=("--num-experts", "4")),
            megatron=megatron("0.12.1"),
            log=tmp_path / "log.txt",
        )
    text = (tmp_path / "log.txt").read_text()
    for flag in ("--bf16", "--use-distributed-optimizer", "--num-experts"):
        assert flag in next(line for line in text.splitlines() if "core loop cannot do this" in line)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("--load-weights", "no-such-file.safetensors"), "cannot read this payload file"),
        (("--tensor-model-parallel-size", "3"), "do not divide into tensor-parallel groups"),
    ],
)
def test_bad_input_is_a_message(extra, says, megatron, tmp_path):
    with pytest.raises(ExternalCommandError):
        run_training(SCRIPT, options(extra=extra), megatron=megatron("0.12.1"), log=tmp_path / "log.txt")
    assert says in (tmp_path / "log.txt").read_text()


@pytest.mark.matrix
def test_weights_of_another_model_are_named(megatron, tmp_path):
    file = str(tmp_path / "weights.safetensors")
    small = options(layers=1, iterations=1, extra=("--save-weights", file))
    run_training(SCRIPT, small, megatron=megatron("0.12.1"), log=tmp_path / "small.txt")
    with pytest.raises(ExternalCommandError):
        run_training(
            SCRIPT,
            options(extra=("--load-weights", file)),
            megatron=megatron("0.12.1"),
            log=tmp_path / "l.txt",
        )
    assert "the weights are not this model's" in (tmp_path / "l.txt").read_text()
