"""Real msprobe on the real CPU trainer, beside our run of the same; and what we write, read by msprobe."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mindspeed_precision import compare_runs, load_run
from mindspeed_precision.msprobe.export import export_run
from mindspeed_precision.records import Severity, Verdict
from mindspeed_precision.testing.recorded import record_training
from mindspeed_precision.testing.trainer import TrainerSettings

pytestmark = [pytest.mark.matrix, pytest.mark.torch, pytest.mark.megatron]

HERE = Path(__file__).parent
MODEL = {"hidden": 16, "heads": 2, "seq_length": 8, "micro_batch_size": 1}
FAULT = "decoder.layers.1.mlp.linear_fc1"


@pytest.fixture(scope="module")
def dumped(msprobe_python, cpu_megatron, tmp_path_factory):
    """Return a function that trains under msprobe and returns the dump; once for each choice."""
    made = {}
    base = tmp_path_factory.mktemp("dumps")
    paths = (HERE.parents[1], cpu_megatron, HERE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def dump(level, task, summary, *more):
        key = (level, task, summary, *more)
        if key not in made:
            out = base / f"dump{len(made)}"
            command = [str(msprobe_python), "-W", "ignore", str(HERE / "trained_with_msprobe.py"), str(out)]
            command += [level, task, summary, "--model", json.dumps(MODEL), *more]
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, umask=0o027
            )
            assert ended.returncode == 0, ended.stderr[-2000:]
            made[key] = out
        return made[key]

    return dump


@pytest.fixture(scope="module")
def ours(cpu_megatron, tmp_path_factory):
    out = tmp_path_factory.mktemp("ours")
    record_training(TrainerSettings(**MODEL), out / "run", steps=2, overrides=["capture.level=tensor"])
    return out / "run"


def aligned_share(found):
    (note,) = [note for note in found.notes if "of modules and parameters aligned" in note]
    return float(note.partition("(")[2].partition(" %")[0])


@pytest.mark.parametrize(
    ("level", "task", "summary", "status"),
    [
        ("L0", "statistics", "statistics", Verdict.WITHIN_TOLERANCE),
        ("mix", "statistics", "md5", Verdict.WITHIN_TOLERANCE),
        ("mix", "tensor", "statistics", Verdict.IDENTICAL),
    ],
)
def test_a_healthy_pair_is_aligned_and_agrees(dumped, ours, level, task, summary, status):
    found = compare_runs(ours, dumped(level, task, summary))
    assert aligned_share(found) >= 95
    assert found.status in (status, Verdict.IDENTICAL)
    assert not [f for f in found.findings if f.severity is not Severity.INFO], found.findings


def test_a_fault_in_dw_is_found(dumped, ours):
    found = compare_runs(ours, dumped("L0", "statistics", "statistics", "--scale-dw", FAULT, "1.05"))
    assert aligned_share(found) >= 95
    assert found.status is Verdict.DIVERGED
    assert found.first_divergence.key.fqn == f"{FAULT}.weight"
    assert any("1.05" in line for f in found.findings for line in f.evidence)


def msprobe(python, *arguments):
    command = [str(python.with_name("msprobe")), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, umask=0o027)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def test_msprobes_compare_reads_what_we_write(msprobe_python, dumped, ours, tmp_path):
    real = dumped("L0", "statistics", "statistics")
    os.umask(0o027)  # msprobe refuses what others may write
    export_run(load_run(ours), tmp_path / "dump", like=real)
    step = Path("step0/rank0/dump.json")
    msprobe(
        msprobe_python, "compare", "-tp", tmp_path / "dump" / step, "-gp", real / step, "-o", tmp_path / "out"
    )
    (result,) = (tmp_path / "out").glob("compare_result_*.csv")
    with result.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    matched = [row for row in rows if row["NPU Name"] == row["Bench Name"]]
    assert len(matched) >= 0.95 * len(rows)
    agree = [row for row in matched if row["Result"] == "pass"]
    assert len(agree) >= 0.95 * len(matched), [row["Err_message"] for row in matched if row not in agree]


def test_msprobes_graph_viewer_reads_what_we_write(msprobe_python, dumped, ours, tmp_path):
    real = dumped("L0", "statistics", "statistics")
    os.umask(0o027)
    export_run(load_run(ours), tmp_path / "dump", like=real)
    (tmp_path / "out").mkdir()
    msprobe(msprobe_python, "graph_visualize", "-tp", tmp_path / "dump", "-gp", real, "-o", tmp_path / "out")
    (graph,) = (tmp_path / "out").glob("*.vis.db")
    with sqlite3.connect(graph) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type='table'")]
        rows = sum(database.execute(f"select count(*) from {name}").fetchone()[0] for name in tables)
    assert rows > 100
