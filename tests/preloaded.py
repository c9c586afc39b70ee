"""``run_training`` without the imports: each rank is a fork of a process that has them done.

Starting torchrun and importing torch and Megatron takes ten times as long as the trainings of these tests.
What is about the start itself (launchers, pieces of the CPU layer that are left out, a rank that is killed)
goes through torchrun, as at a user's.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a process with MindSpore collects these tests, too, and has no torch
    from mindspeed_precision.testing.demo.forked import ForkedTrainings
    from mindspeed_precision.testing.demo.launch import CompletedRun

AT_MOST = 3
"""Servers at a time, one for each version of Megatron; each has a GB."""

_servers: dict[Path, ForkedTrainings] = {}


def run_training(
    script: Path,
    args: Sequence[str],
    *,
    processes: int = 1,
    megatron: Path,
    environment: Mapping[str, str] | None = None,
    log: Path,
    timeout: float = 600,
) -> CompletedRun:
    """Run ``script`` under the CPU layer, and wait for it; see ``launch.run_training``."""
    from mindspeed_precision.testing.demo.forked import ForkedTrainings

    server = _servers.pop(megatron, None) or ForkedTrainings(megatron)
    _servers[megatron] = server  # the one used last is the last
    if len(_servers) > AT_MOST:
        _servers.pop(next(iter(_servers))).close()
    return server.run(
        [str(script), *args], processes=processes, environment=environment, log=log, timeout=timeout
    )


@atexit.register
def _close() -> None:
    for server in _servers.values():
        server.close()
