"""One file of settings refines two runs of different parallel layouts, or of a layout of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from preloaded import run_training

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Phase, Role
from mindspeed_precision.report.files import write_files

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.long]

SCRIPT = Path(__file__).parents[1] / "align" / "scripts" / "record_layout.py"
MODEL = {"hidden": 64, "kv_groups": 2}
TARGET = "decoder.layers.0.self_attention.linear_proj.weight"
START = "capture.rules=[{role: param, phase: init, level: tensor}]"


@pytest.fixture
def record(megatron, tmp_path):
    def train(name, processes, *, plant="", config=None, overrides=(), **settings):
        asked = {"settings": {**MODEL, **settings}, "steps": 2, "overrides": list(overrides), "plant": plant}
        if config is not None:
            asked["config"] = config
        out = tmp_path / name
        run_training(
            SCRIPT,
            [str(out), json.dumps(asked)],
            processes=processes,
            megatron=megatron("0.17.1"),
            log=tmp_path / f"{name}.txt",
        )
        return out

    return train


def test_one_file_for_two_layouts(record, tmp_path):
    one = record("one", 1, overrides=["capture.level=sketch", START])
    start = f"init_from={one}"
    two = record("two", 2, tp=2, plant="transposed_shard", overrides=["capture.level=sketch", start])
    diagnosis = compare_runs(one, two)
    first = diagnosis.first_divergence
    assert (first.key.phase, first.key.role, first.key.fqn) == (Phase.WGRAD, Role.WGRAD, TARGET)
    assert "rel_frobenius" not in first.comparison.metrics
    files = write_files(diagnosis, tmp_path / "compare")
    baseline, candidate = (diagnosis.refinement.overrides[side] for side in diagnosis.refinement.overrides)
    assert (baseline, candidate) == ((), (start,))

    again = record("one-refined", 1, config=files["refine"])
    wrong = record(
        "two-refined", 2, tp=2, plant="transposed_shard", config=files["refine"], overrides=candidate
    )
    refined = compare_runs(again, wrong)
    first = refined.first_divergence
    assert (first.key.phase, first.key.role, first.key.fqn) == (Phase.WGRAD, Role.WGRAD, TARGET)
    assert first.comparison.metrics["mismatched"] > 0  # from the elements of both shards
    assert "determinism.not_repeated" not in [finding.id for finding in refined.findings]
    assert "coverage.rule_without_match" not in [finding.id for finding in refined.findings]
    shards = [record for rank in load_run(wrong).ranks.values() for record in rank.records if record.payload]
    assert {record.key.fqn.removesuffix(".weight") for record in shards} == {TARGET.removesuffix(".weight")}


def test_one_rank_of_a_tensor_parallel_pair_is_enough(record, tmp_path):
    """The candidate's start is its own in both passes; the fault is on the last rank alone."""
    quiet = ["capture.level=fingerprint"]
    one = record("one", 2, tp=2, overrides=quiet)
    two = record("two", 2, tp=2, plant="transposed_shard", overrides=quiet)
    files = write_files(compare_runs(one, two), tmp_path / "compare")
    again = record("one-refined", 2, tp=2, config=files["refine"])
    wrong = record("two-refined", 2, tp=2, plant="transposed_shard", config=files["refine"])
    refined = compare_runs(again, wrong)
    first = refined.first_divergence
    assert (first.key.fqn, first.ranks) == (TARGET, (1,))
    assert first.comparison.metrics["mismatched"] > 0
    held = {number for number, rank in load_run(wrong).ranks.items() if any(r.payload for r in rank.records)}
    assert held == {1}
    assert "determinism.not_repeated" not in [finding.id for finding in refined.findings]
