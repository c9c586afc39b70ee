"""Where the records of a distributed optimizer's ranks come, whatever ranges a rank has."""

from __future__ import annotations

from mindspeed_precision.align.ranges import is_divided, places_of, ranged_names, unranged
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.records import Phase, RecordKey, Role
from mindspeed_precision.testing.scale_runs import ScaleRun, write_scale_run


def test_what_all_replicas_have_comes_at_one_place_of_each(tmp_path):
    run = load_run(write_scale_run(tmp_path / "run", ScaleRun(dp=3, distributed=True)))
    names = [p.fqn for p in run.ranks[0].parameters]
    found, sequences = {}, {}
    for rank, held in run.ranks.items():
        places = places_of(held.records, names, late=False)
        own = ranged_names(held.records)
        shared = [r for r in held.records if r.key.fqn not in own or not is_divided(r.key, late=False)]
        found[rank] = {r.key: places[r.seq] for r in shared}
        sequences[rank] = {r.key: r.seq for r in shared}
        assert len(set(places.values())) == len(held.records)
        assert own < set(names)
    assert found[0] == found[1] == found[2]
    assert sequences[0] != sequences[1]  # as the records are numbered, they do not


def test_ranks_without_ranges_are_left_as_they_are(tmp_path):
    run = load_run(write_scale_run(tmp_path / "run", ScaleRun(dp=2)))
    assert not places_of(run.ranks[1].records, ["any"], late=False)


def test_a_range_is_told_from_other_slots():
    key = RecordKey(step=0, phase=Phase.REDUCE, fqn="w", role=Role.REDUCED_GRAD, slot="0:12")
    assert unranged(key).slot == ""
    collective = RecordKey(
        step=0, phase=Phase.REDUCE, fqn="collective", role=Role.MAIN_GRAD, slot="all_reduce"
    )
    assert unranged(collective) is collective
