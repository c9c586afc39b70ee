"""Stand-ins for what Megatron calls in ``torch.cuda``. Memory statistics need none: a CPU build answers 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_precision.testing.cpu.device import CPU
from mindspeed_precision.testing.piece import Piece


class CpuEvent:
    """What stands in for ``torch.cuda.Event``: it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, other: CpuEvent) -> float:
        """Return the milliseconds from this event to ``other``."""
        return (other._time - self._time) * 1e3


class CpuStream:
    """What stands in for ``torch.cuda.Stream``: work on a CPU is done when the call returns."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Any = None) -> Any:
        """Return ``event``, or a new one."""
        return event if event is not None else CpuEvent()

    def query(self) -> bool:
        """Return True: nothing is outstanding."""
        return True


class CpuGenerators(tuple[Any, ...]):
    """What stands in for ``torch.cuda.default_generators``: one generator, whatever device is asked for."""

    def __getitem__(self, device: Any) -> Any:
        return torch.default_generator


@dataclass(frozen=True, kw_only=True)
class CpuProperties:
    """What stands in for a device's properties: an A100's capability, since Megatron branches on it."""

    name: str = "CPU standing in for CUDA"
    major: int = 8
    minor: int = 0
    total_memory: int = 1 << 34
    multi_processor_count: int = 1
    warp_size: int = 32


def _set(**stand_ins: Callable[..., Any]) -> None:
    for name, function in stand_ins.items():
        function.__name__ = function.__qualname__ = name
        setattr(torch.cuda, name, function)


def _present_a_device() -> None:
    # one lambda each: torch._dynamo refuses two names for one function
    _set(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        current_device=lambda: CPU,  # right as device=, also in functions that are not redirected
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
    )


def _share_the_generator() -> None:
    def seed(number: int) -> None:
        torch.default_generator.manual_seed(int(number))

    def seed_all(number: int) -> None:  # torch.manual_seed calls it with its own seed
        torch.default_generator.manual_seed(int(number))

    _set(
        get_rng_state=lambda device="cuda": torch.get_rng_state(),
        set_rng_state=lambda new_state, device="cuda": torch.set_rng_state(new_state),
        manual_seed=seed,
        manual_seed_all=seed_all,
        _lazy_init=lambda: None,
        _lazy_call=lambda callable, **_: callable(),
    )
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.default_generators = CpuGenerators((torch.default_generator,))


def _run_streams_in_place() -> None:
    stream = CpuStream()
    torch.cuda.Stream = torch.cuda.streams.Stream = CpuStream
    torch.cuda.Event = torch.cuda.streams.Event = CpuEvent
    _set(
        stream=lambda stream: stream if stream is not None else CpuStream(),
        set_stream=lambda stream: None,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        is_current_stream_capturing=lambda: False,
    )


def _describe_a_device() -> None:
    _set(
        get_device_capability=lambda device=None: (CpuProperties.major, CpuProperties.minor),
        get_device_properties=lambda device=None: CpuProperties(),
        get_device_name=lambda device=None: CpuProperties.name,
    )


PIECES = (
    Piece(
        name="cuda_device",
        why="Megatron asserts that CUDA is there, counts devices and synchronises; the process's device "
        "is the CPU.",
        error_without="AssertionError: Megatron requires CUDA",
        when="every run",
        apply=_present_a_device,
    ),
    Piece(
        name="cuda_generator",
        why="The RNG tracker reads, sets and seeds the device generator; operations on a CPU draw from "
        "torch's default generator, so that is the device generator here. Hosts and devices then "
        "share one: see loader_randomness.",
        error_without="AssertionError: Torch not compiled with CUDA enabled",
        when="every run",
        apply=_share_the_generator,
    ),
    Piece(
        name="cuda_streams",
        why="Communication and data movement are put on side streams; here a stream runs in "
        "place, and an event has happened.",
        error_without="torch.cuda.Stream requires CUDA support",
        when="every run of newer versions",
        versions=">=0.16",
        apply=_run_streams_in_place,
    ),
    Piece(
        name="cuda_properties",
        why="Fusions and kernels are chosen by compute capability; an A100's is given.",
        error_without="AssertionError: Torch not compiled with CUDA enabled",
        when="TP or CP > 1, and newer versions at import",
        apply=_describe_a_device,
    ),
)
