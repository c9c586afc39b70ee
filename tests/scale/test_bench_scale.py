"""The benchmark of large runs measures what it says, at a size that takes seconds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scale.py"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))  # as it is for a script: its modules lie beside it
    spec = importlib.util.spec_from_file_location("bench_scale", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_small_run_is_measured_and_leaves_nothing(scale, tmp_path, capsys):
    sizes = {"tp": 1, "pp": 2, "dp": 4, "layers": 1, "microbatches": 2, "steps": 2}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    scratch, numbers = tmp_path / "scratch", tmp_path / "numbers.json"
    words += ["--scratch", str(scratch), "--memory", "1MiB", "--jobs", "1", "--json", str(numbers)]
    assert scale.main(words) == 0
    told = capsys.readouterr().out
    [cost] = json.loads(numbers.read_text())["one"]
    assert (cost["ranks"], cost["steps"], cost["status"]) == (8, 2, 1)
    assert "8 ranks were read and compared" in cost["told"]
    assert cost["memory_mib"] > 20
    assert cost["cpu_seconds"] > 0
    assert f"| 8 | 2 | {cost['records']:.0f} |" in told
    assert not list(scratch.iterdir())


def test_a_check_of_one_run_is_measured(scale, tmp_path):
    sizes = {"tp": 1, "pp": 2, "dp": 4, "layers": 1, "microbatches": 2, "steps": 2}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    scratch, numbers = tmp_path / "scratch", tmp_path / "numbers.json"
    words += ["--check", "--scratch", str(scratch), "--memory", "4MiB", "--jobs", "1", "--json", str(numbers)]
    assert scale.main(words) == 0
    [cost] = json.loads(numbers.read_text())["one"]
    assert "checked in parts (4 data-parallel replicas of 2 ranks" in cost["told"]
    assert (cost["ranks"], cost["steps"]) == (8, 2)
    assert not list(scratch.iterdir())


def test_a_line_is_fitted_to_processor_time_over_records(scale):
    costs = [
        scale.Cost(
            ranks=ranks,
            steps=2,
            records=500.0,
            gigabytes=1.0,
            seconds=1.0,
            cpu_seconds=3.0 + ranks * 2000 * 5e-6,
            memory_mib=1,
            status=1,
            told="",
        )
        for ranks in (8, 16, 32)
    ]
    assert scale.fitted(costs) == pytest.approx((3.0, 5.0))


def test_the_figure_tells_the_lines_that_were_fitted(scale, tmp_path):
    pytest.importorskip("matplotlib")
    costs = [
        scale.Cost(
            ranks=ranks,
            steps=ranks,
            records=float(ranks),
            gigabytes=1.0,
            seconds=1.0,
            cpu_seconds=3.0 + 0.25 * ranks,
            memory_mib=100 + 2 * ranks,
            status=1,
            told="",
        )
        for ranks in (8, 16, 64)
    ]
    fit = scale.line([cost.ranks for cost in costs], [cost.cpu_seconds for cost in costs])
    assert (fit.constant, fit.slope, fit.off) == pytest.approx((3.0, 0.25, 0.0))
    assert fit.describe("s", "ranks") == "3.0 s + 0.25 s for each of the ranks"
    for name in ("one.svg", "two.svg"):
        scale.draw(dict.fromkeys(("ranks", "steps", "records"), costs), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    drawn = (tmp_path / "one.svg").read_text()
    assert "3 s + 0.25 s × ranks" in drawn
    assert drawn.count("records a step and rank") == 2


def test_ranks_steps_and_records_grow_one_at_a_time(scale):
    grown = scale.variations(scale.WHOLE)
    assert [run.world for run in grown["ranks"]] == [4096, 8192, 16384, 32768]
    assert [run.steps for run in grown["steps"]] == [3, 6, 12, 24]
    counts = [scale.records_per_step(run) for run in grown["records"]]
    assert counts == sorted(counts)
    assert {run.world for name in ("steps", "records") for run in grown[name]} == {4096}
