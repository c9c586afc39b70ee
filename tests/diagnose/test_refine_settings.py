"""What the settings of a second pass say: level of all else, names of both sides, one microbatch and rank."""

from __future__ import annotations

import pytest

from mindspeed_precision.config import load_settings
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Level, Phase, RecordKey, Role, Side
from mindspeed_precision.report.files import write_files
from mindspeed_precision.testing.fake_runs import LINEAR, nudged, plant, scaled, write_fake_run

OWN = "net.blocks.1.up"


def wrong(value=None, **where):
    return [plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=0, value=value or scaled(2), **where)]


def refined(tmp_path, one, two, **options):
    diagnosis = compare_runs(one, two, replay=False, **options)
    return load_settings(write_files(diagnosis, tmp_path / "compare")["refine"])


@pytest.mark.parametrize("level", [Level.STATISTICS, Level.SKETCH])
def test_under_a_tolerance_all_else_is_kept_as_it_was_judged(level, tmp_path):
    one = write_fake_run(tmp_path / "one", level=level)
    two = write_fake_run(tmp_path / "two", level=level, plants=wrong())
    assert refined(tmp_path, one, two, policy="tolerance").capture.level is level
    assert refined(tmp_path, one, two).capture.level is Level.FINGERPRINT


def test_one_rank_and_one_microbatch_are_kept(tmp_path):
    shape = {"ranks": 2, "microbatches": 3}
    one = write_fake_run(tmp_path / "one", **shape)
    two = write_fake_run(tmp_path / "two", **shape, plants=wrong(nudged(3)))
    settings = refined(tmp_path, one, two)

    def kept(rank, microbatch):
        key = RecordKey(step=0, microbatch=microbatch, phase=Phase.WGRAD, fqn=LINEAR, role=Role.GRAD_OUTPUT)
        return settings.capture.on_rank(rank).level_of(key) is Level.TENSOR

    assert [(r, mb) for r in range(2) for mb in range(3) if kept(r, mb)] == [(0, 0)]
    assert {record.rank for record in settings.refines[Side.CANDIDATE].records} == {0}


def test_names_of_both_sides_are_in_one_file(tmp_path):
    one = write_fake_run(tmp_path / "one")
    two = write_fake_run(tmp_path / "two", plants=wrong())
    index = two / "rank00000" / "index.jsonl"
    index.write_text(index.read_text().replace(LINEAR, OWN))
    (two / "rank00000" / "COMPLETE").unlink()
    mapping = tmp_path / "names.yaml"
    mapping.write_text(f"schema: 1\nside: candidate\nnames: [{{from: {OWN}, to: {LINEAR}}}]\n")
    settings = refined(tmp_path, one, two, mapping=[mapping])

    def level(fqn):
        key = RecordKey(step=0, microbatch=0, phase=Phase.WGRAD, fqn=fqn, role=Role.INPUT)
        return settings.capture.level_of(key)

    assert level(LINEAR) is level(OWN) is Level.TENSOR
    names = {side: {record.key.fqn for record in first.records} for side, first in settings.refines.items()}
    assert LINEAR in names[Side.BASELINE] - names[Side.CANDIDATE]
    assert OWN in names[Side.CANDIDATE] - names[Side.BASELINE]
