"""Train cases under msprobe, in its environment: ``msprobe_train.py DUMPS SUMMARY NAME...``.

Torch, Megatron and msprobe are imported once; each training runs in processes that are forked from this one,
because msprobe's debugger is made before the model, patches torch for good, and is one for each process. Each
training that ends as it should leaves ``DUMPS/SUMMARY/NAME/DONE``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mindspeed_precision.testing import cpu

cpu.install()

from msprobe.pytorch import PrecisionDebugger  # noqa: E402

from mindspeed_precision.patching.session import PatchSession  # noqa: E402
from mindspeed_precision.testing.demo.launch import free_port  # noqa: E402
from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings  # noqa: E402
from silentbench.case import Training  # noqa: E402
from silentbench.trainings import known  # noqa: E402

LEVEL = "L0"
"""Modules. At level mix the functions that a plant calls shift the numbers by which its compare matches
functions, which the kernel that the plant stands for would not do."""
SECONDS = 240


def debugger(out: Path, summary: str) -> Any:
    """Return msprobe's debugger, which dumps what tensors are summed up to: ``statistics`` or ``md5``."""
    kept = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary}
    plain = {"task": "statistics", "dump_path": str(out), "rank": [], "step": [], "level": LEVEL}
    config = out / f"config{os.environ['RANK']}.json"
    config.write_text(json.dumps({**plain, "statistics": kept}), encoding="utf-8")
    return PrecisionDebugger(config_path=str(config))


def train(training: Training, out: Path, summary: str) -> None:
    """Train with what is planted, each step inside the debugger, as its documentation's template does."""
    probe = debugger(out, summary)
    try:
        with (
            PatchSession(training.patches, allow_external=True),
            CpuTrainer(TrainerSettings(**training.settings)) as trainer,
        ):
            for _ in range(training.steps):
                probe.start(model=trainer.model)
                trainer.train_one_step()
                probe.stop()
                probe.step()
    except Exception as error:
        if not training.raises or training.raises not in f"{type(error).__name__}: {error}":
            raise
        probe.stop()


def forked(training: Training, out: Path, summary: str) -> bool:
    """Train in as many processes as the training has ranks; tell whether all ended well."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(mode=0o750, parents=True)
    port = free_port()
    children = [_child(training, out, summary, rank, port) for rank in range(training.world)]
    until, ended = time.monotonic() + SECONDS, {}
    while len(ended) < len(children) and time.monotonic() < until:
        for child in set(children) - ended.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                ended[child] = status
        time.sleep(0.05)
    for child in set(children) - ended.keys():
        os.kill(child, 9)
        os.waitpid(child, 0)
    return len(ended) == len(children) and not any(ended.values())


def _child(training: Training, out: Path, summary: str, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(training.world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(training.world), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    status = 1
    try:
        train(training, out, summary)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    dumps, mode = Path(sys.argv[1]), sys.argv[2]
    for name in sys.argv[3:]:
        place = dumps / mode / name
        if forked(known()[name], place, mode):
            (place / "DONE").touch()
