"""Make the golden runs: two steps on two ranks, recorded by the last commit that wrote each schema.

    python tests/golden/make_golden.py .mcore/0.17.1 [SCHEMA…]

A run that is here is never made anew: it stands for what users have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMMITS = {1: "e8cf82c^", 2: "bf3ffa5^", 3: "887d851^", 4: "HEAD"}
TRAIN = """
import sys
from pathlib import Path
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import SCRIPT, run_training
out, megatron = Path(sys.argv[1]), Path(sys.argv[2])
size = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 2}
arguments = demo_arguments(iterations=2, dropout=0.0, tp=2, **size)
flags = ["--precision-debug", "--precision-debug-out", str(out)]
flags += ["--precision-debug-set", "capture.rules=[{fqn: 'decoder.final_layernorm*', level: tensor}]"]
run_training(SCRIPT, [*arguments, *flags], processes=2, megatron=megatron, log=out.with_suffix(".log"))
"""


def make(schema: int, megatron: Path) -> Path:
    """Train with the code of that time; return the archive of the run."""
    archive = HERE / f"schema{schema}.tar.gz"
    with tempfile.TemporaryDirectory() as directory:
        code, out = Path(directory) / "code", Path(directory) / "run"
        code.mkdir()
        source = subprocess.run(["git", "archive", COMMITS[schema]], capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", str(code)], input=source, check=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(code),
            "PYTHONHASHSEED": "1234",
            "OMP_NUM_THREADS": "1",
        }
        words = [sys.executable, "-W", "ignore", "-c", TRAIN, str(out), str(megatron.resolve())]
        subprocess.run(words, env=environment, check=True, cwd=directory)
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(out, arcname="run")
    return archive


if __name__ == "__main__":
    for number in map(int, sys.argv[2:]) if len(sys.argv) > 2 else COMMITS:
        if not (HERE / f"schema{number}.tar.gz").exists():
            made = make(number, Path(sys.argv[1]))
            sys.stdout.write(f"{made}: {made.stat().st_size} bytes\n")
