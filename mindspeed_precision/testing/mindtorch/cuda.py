"""Stand-ins for what Megatron calls in ``torch.cuda``."""

from __future__ import annotations

from typing import Any

from mindspeed_precision.testing.mindtorch.piece import CompatPiece, Mends, load


def _present_a_device() -> None:
    torch = load("mindtorch")
    cpu = torch.device("cpu")

    def current_device() -> Any:
        return cpu

    def do_nothing(*_: Any, **__: Any) -> None:
        """Stand in for what a CPU has no need of."""

    torch.cuda.current_device = current_device
    torch.cuda._lazy_init = do_nothing
    torch.cuda.synchronize = do_nothing
    torch.cuda.empty_cache = do_nothing


PIECES = (
    CompatPiece(
        name="cuda_device",
        mends=Mends.MEGATRON,
        changes=("torch.cuda.current_device", "._lazy_init", ".synchronize", ".empty_cache"),
        why="Megatron asks for the current device and synchronises it; it is the CPU, which MindSpore "
        "refuses to synchronise.",
        error_without="ModuleNotFoundError: No module named 'mindtorch.cuda._lazy_init'",
        when="every run",
        apply=_present_a_device,
    ),
)
