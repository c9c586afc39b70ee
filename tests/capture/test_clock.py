"""The clock tells microbatches and occurrences from calls alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mindspeed_precision.backends.torch_capture import TorchCapture  # noqa: E402
from mindspeed_precision.capture.clock import Clock  # noqa: E402

inside_backward = TorchCapture().inside_backward

pytestmark = pytest.mark.torch


def test_the_nth_call_of_a_chunk_is_the_nth_microbatch():
    clock = Clock(inside_backward)
    clock.begin_step()
    seen = []
    for _ in range(3):
        clock.begin_forward(0)
        seen.append(clock.forward_microbatch)
    assert seen == [0, 1, 2]
    assert clock.microbatches == 3
    clock.begin_step()
    assert clock.microbatches == 0


def test_virtual_chunks_count_for_themselves():
    clock = Clock(inside_backward)
    clock.begin_step()
    order = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for chunk, expected in order:
        clock.begin_forward(chunk)
        assert clock.forward_microbatch == expected


def test_an_announced_forward_is_counted_once():
    clock = Clock(inside_backward)
    clock.begin_step()
    clock.announce_forward(0)
    clock.begin_forward(0)
    clock.announce_forward(0)
    clock.begin_forward(0)
    assert clock.forward_microbatch == 1
    assert clock.microbatches == 2


def test_calls_of_one_module_are_numbered_within_a_microbatch():
    clock = Clock(inside_backward)
    clock.begin_step()
    clock.begin_forward(0)
    first, second = clock.enter("layer"), clock.enter("layer")
    clock.begin_forward(0)
    third = clock.enter("layer")
    assert [call.occurrence for call in (first, second, third)] == [0, 1, 0]


def test_a_forward_inside_the_backward_is_a_recomputation_and_is_not_counted():
    clock = Clock(inside_backward)
    clock.begin_step()
    clock.begin_forward(0)
    clock.enter("layer")
    clock.leave("layer")
    calls = []
    leaf = torch.ones(1, requires_grad=True)
    out = leaf * 2

    def recompute(grad):
        assert inside_backward()
        clock.backward_microbatch = 0
        calls.append(clock.enter("layer"))

    out.register_hook(recompute)
    out.backward()
    assert not inside_backward()
    assert (calls[0].recomputed, calls[0].occurrence, calls[0].microbatch) == (True, 0, 0)


def test_leaving_a_module_that_was_never_entered_is_noticed():
    clock = Clock(inside_backward)
    clock.begin_step()
    clock.enter("outer")
    assert clock.leave("inner") is None
