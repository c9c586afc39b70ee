"""The two traps that raise no error: each is shown without its piece, and then gone with it."""

from __future__ import annotations

import pytest

from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import run_training

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


@pytest.mark.matrix
@pytest.mark.parametrize("without", [("loader_randomness",), ()])
def test_dropout_stays_equal_on_tensor_parallel_ranks(without, megatron, tmp_path, scripts):
    """Trap a: only the first rank makes a loader, which draws from dropout's generator."""
    done = run_training(
        scripts / "compare_replicas.py",
        demo_arguments(tp=2, dropout=0.1, iterations=2),
        processes=2,
        megatron=megatron("0.17.1"),
        log=tmp_path / "log.txt",
        without=without,
    )
    if without:
        assert "REPLICAS DIFFER" in done.text
        assert "linear_fc2.bias (main_grad)" in done.text
        assert "layernorm.weight (main_grad)" in done.text
    else:
        assert "REPLICAS EQUAL" in done.text


def test_a_loader_does_not_move_the_generator(cpu_megatron):
    """Trap a in one process: the state after making a loader's iterator, with the piece and without it."""
    import torch
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def state_moves():
        before = torch.get_rng_state()
        iter(torch.utils.data.DataLoader([1, 2, 3]))
        return not torch.equal(before, torch.get_rng_state())

    assert not state_moves()
    with_piece = _BaseDataLoaderIter.__init__
    _BaseDataLoaderIter.__init__ = with_piece.__wrapped__
    try:
        assert state_moves()
    finally:
        _BaseDataLoaderIter.__init__ = with_piece


@pytest.mark.parametrize("piece", [None, "send_alias"])
def test_what_is_being_sent_outlives_its_deallocation(piece, cpu_megatron, monkeypatch):
    """Trap b: gloo reads the tensor that it was given after Megatron has swapped its storage.

    Whether a wrong number arrives depends on timing, so the mechanism is looked at: what gloo holds.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    from mindspeed_precision.testing import cpu

    given = []

    def gloo_isend(tensor, *args, **kwargs):
        given.append(tensor)
        return object()

    monkeypatch.setattr(dist, "isend", gloo_isend)
    monkeypatch.setattr(dist.distributed_c10d, "isend", gloo_isend)
    if piece:
        next(entry for entry in cpu.PIECES if entry.name == piece).apply()
        assert dist.isend is dist.distributed_c10d.isend is not gloo_isend
    activation = torch.arange(6.0)
    address = activation.data_ptr()
    dist.isend(activation, 1)
    deallocate_output_tensor(activation, deallocate_pipeline_outputs=True)
    assert activation.numel() == 1, "Megatron no longer frees what it sent: the piece may go"
    if piece:
        assert given[0].data_ptr() == address
        assert torch.equal(given[0], torch.arange(6.0))
    else:
        assert given[0].numel() == 1  # gloo was left with another storage than it began to send
