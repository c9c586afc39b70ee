"""SIGKILL in the middle of a step: every step that was whole is still readable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from mindspeed_precision.dump.reader import load_run

PROGRAM = """
import os, signal, sys
from pathlib import Path
import numpy as np
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump import writer as writing
from mindspeed_precision.records import Digest, Phase, RankCoordinates, RecordKey, Role, TensorRecord

where, victim, queue = sys.argv[2], 3, int(sys.argv[3])
run = Path(sys.argv[1])
writing.create_run(run, {"parallel": {"world_size": 1}})
writer = writing.RankWriter(run, coordinates=RankCoordinates(), queue=queue)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class HalfOfAFile:
    def __init__(self, file):
        self.file = file
    def write(self, data):
        self.file.write(bytes(data)[: len(data) // 2])
        die()

def record(seq, step):
    key = RecordKey(step=step, microbatch=0, phase=Phase.FPROP, fqn="layer", role=Role.OUTPUT)
    digest = Digest(fingerprint=seq, unordered=seq)
    return TensorRecord(seq=seq, key=key, shape=(2,), dtype="bfloat16", layout=None, digest=digest)

for step in range(5):
    if step == victim:
        writer._jobs.finish()
    if step == victim and where == "payload":
        writing.os.fsync = die
    if step == victim and where == "rename":
        Path.replace = die
    if step == victim and where == "index":
        writer._file = HalfOfAFile(writer._file)
    records = [record(2 * step, step), record(2 * step + 1, step)]
    payloads = {2 * step: HostTensor(bits=np.array([step, 1], np.uint16), dtype="bfloat16")}
    writer.write_step(step, records, payloads, microbatches=1)
writer._jobs.finish()
"""


@pytest.mark.parametrize("queue", [0, 1 << 20])
@pytest.mark.parametrize("where", ["payload", "rename", "index"])
def test_whole_steps_survive_sigkill(tmp_path, where, queue):
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "run"), where, str(queue)]
    ended = subprocess.run(program, env=os.environ, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    run = load_run(tmp_path / "run")
    rank = run.ranks[0]
    assert rank.steps == (0, 1, 2)
    assert [rank.payload(record).bits[0] for record in rank.records[::2]] == [0, 1, 2]
    assert not rank.complete
    assert any("after step 2 was written" in note for note in run.notes)
    assert any("not whole" in note for note in run.notes) == (where == "index")
