"""Workers of Dask, processes of their own, give the answer of one process; also when one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.engines import Resources
from mindspeed_precision.flow import compare_in_full
from mindspeed_precision.testing.folded import folded, smallest, told
from mindspeed_precision.testing.scale_runs import Fault, ScaleRun, write_scale_run

distributed = pytest.importorskip("distributed", reason="dask is an extra: pip install .[dask]")

RUN = {"tp": 2, "pp": 2, "dp": 6}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    scratch = tmp_path_factory.mktemp("dask")
    one = write_scale_run(scratch / "baseline", ScaleRun(**RUN))
    return one, write_scale_run(scratch / "candidate", ScaleRun(**RUN, fault=Fault(step=1, dp=3, tp=1)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as one:
        yield one


def test_the_workers_of_a_scheduler_give_the_same_answer(runs, cluster):
    by_dask = folded(*runs, dask=cluster.scheduler_address)
    assert told(by_dask) == told(folded(*runs)) == told(compare_in_full(*runs))


def test_a_worker_that_is_killed_in_the_middle_changes_nothing(runs, cluster):
    killed: list[int] = []
    before = {worker.pid for worker in cluster.workers.values()}

    def kill_one(stage: str, done: int, total: int | None) -> None:
        if stage == "reading" and done and total and done < total and not killed:
            killed.append(next(iter(before)))
            os.kill(killed[0], signal.SIGKILL)

    small = Resources(memory=smallest(*runs), dask=cluster.scheduler_address)
    found = compare_in_full(*runs, resources=small, progress=kill_one)
    assert killed
    assert killed[0] not in {worker.pid for worker in cluster.workers.values()}
    assert told(found) == told(folded(*runs))


def test_the_command_starts_a_cluster_of_its_own(runs, tmp_path):
    words = ["compare", *map(str, runs), "--out", str(tmp_path / "out")]
    assert main([*words, "--memory", str(smallest(*runs)), "--dask", "--jobs", "2"]) == 1
    by_dask = (tmp_path / "out" / "verdict.json").read_text()
    assert main(words) == 1
    assert (tmp_path / "out" / "verdict.json").read_text() == by_dask


def test_an_address_where_nobody_answers_is_one_clear_error(runs, capsys):
    words = ["compare", *map(str, runs), "--memory", str(smallest(*runs))]
    assert main([*words, "--dask", "tcp://127.0.0.1:9"]) == 2
    assert "tcp://127.0.0.1:9" in capsys.readouterr().err


def test_a_scheduler_without_workers_is_one_clear_error(runs, capsys, monkeypatch):
    monkeypatch.setattr("mindspeed_precision.engines._PATIENCE", 1)
    words = ["compare", *map(str, runs), "--memory", str(smallest(*runs))]
    with distributed.LocalCluster(n_workers=0, processes=True, dashboard_address=None) as empty:
        assert main([*words, "--dask", empty.scheduler_address]) == 2
    assert "no worker has joined this scheduler" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["scheduler", "tcp://host:port", "runs/baseline"])
def test_what_is_no_address_is_refused(runs, capsys, address):
    words = ["compare", *map(str, runs), "--memory", str(smallest(*runs))]
    assert main([*words, "--dask", address]) == 2
    assert f"--dask: no address (found {address!r}" in capsys.readouterr().err
