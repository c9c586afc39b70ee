"""Alignment: what is paired, what is left out and said, and what cannot be compared at all."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from mindspeed_precision.align import align
from mindspeed_precision.align.match import CLOSEST
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.records import SCHEDULE, Level, Phase, RecordKey, Role, Side
from mindspeed_precision.testing.fake_runs import LINEAR, plant, write_fake_run


def runs(directory, one=None, two=None):
    return load_run(write_fake_run(directory / "one", **(one or {}))), load_run(
        write_fake_run(directory / "two", **(two or {}))
    )


def test_equal_runs_have_only_pairs(tmp_path):
    one, two = runs(tmp_path, {"ranks": 2}, {"ranks": 2})
    alignment = align(one, two)
    assert len(alignment.pairs) == sum(len(rank.records) for rank in one.ranks.values())
    assert (alignment.ranks, alignment.steps) == ((0, 1), (0, 1))
    assert alignment.unmatched == alignment.notes == ()


def test_levels_may_differ(tmp_path):
    alignment = align(*runs(tmp_path, {"level": Level.TENSOR}, {"level": Level.FINGERPRINT}))
    assert alignment.unmatched == ()


def test_steps_of_one_run_are_left_out_and_named(tmp_path):
    alignment = align(*runs(tmp_path, {"steps": 1}, {"steps": 4}))
    assert alignment.steps == (0,)
    assert alignment.notes == ("steps 1-3 are whole in the candidate only: not compared",)
    assert {pair.key.step for pair in alignment.pairs} == {-1, 0}


def test_a_step_must_be_whole_on_every_rank(tmp_path):
    one, two = runs(tmp_path, {"ranks": 2}, {"ranks": 2})
    last = two.ranks[1]
    shorter = replace(last, steps=last.steps[:-1], records=tuple(r for r in last.records if r.key.step < 1))
    alignment = align(one, replace(two, ranks={**two.ranks, 1: shorter}))
    assert alignment.steps == (0,)
    assert "step 1 is not whole on every rank of the candidate: not compared" in alignment.notes


def test_ranks_of_one_run_are_left_out_and_named(tmp_path):
    one, two = runs(tmp_path, {"ranks": 2}, {"ranks": 2})
    shutil.rmtree(tmp_path / "two" / "rank00001")
    alignment = align(one, load_run(tmp_path / "two"))
    assert alignment.ranks == (0,)
    assert alignment.notes == ("only the baseline recorded ranks 1: not compared",)
    alone = replace(two, ranks={1: two.ranks[1]})
    with pytest.raises(IncomparableError, match="no rank was recorded by both"):
        align(replace(one, ranks={0: one.ranks[0]}), alone)


def test_unmatched_records_come_with_the_closest(tmp_path):
    alignment = align(
        *runs(tmp_path, two={"plants": [plant(phase="fprop", role="output", fqn=LINEAR, drop=True)]})
    )
    assert {(u.side, u.key.fqn) for u in alignment.unmatched} == {(Side.BASELINE, LINEAR)}
    closest = alignment.unmatched[0].closest
    assert 0 < len(closest) <= CLOSEST
    assert closest[0].role.value == "output"
    assert closest[0].fqn == "decoder.layers.0.mlp.linear_fc1"


def test_recomputation_in_one_run_is_no_loss(tmp_path):
    one, two = runs(tmp_path)
    rank = two.ranks[0]
    extra = next(record for record in rank.records if record.key.phase.value == "fprop")
    again = replace(extra, seq=10_000, key=replace(extra.key, recomputed=True))
    alignment = align(one, replace(two, ranks={0: replace(rank, records=(*rank.records, again))}))
    assert alignment.unmatched == ()
    assert alignment.notes == (
        "only the candidate recomputes activations: 1 recomputed records not compared",
    )


def test_a_key_that_occurs_twice_is_said(tmp_path):
    one, two = runs(tmp_path)
    rank = two.ranks[0]
    again = replace(rank.records[20], seq=10_000)
    alignment = align(one, replace(two, ranks={0: replace(rank, records=(*rank.records, again))}))
    assert "1 keys occur more than once on rank 0 of the candidate" in alignment.notes[0]


def test_different_models_say_which_parameter(tmp_path):
    one, two = runs(tmp_path)
    rank = two.ranks[0]
    other = replace(rank.parameters[0], shape=(3, 4))
    changed = replace(rank, parameters=(other, *rank.parameters[2:]))
    with pytest.raises(IncomparableError, match=r"2 parameters differ.*word_embeddings.weight\[3, 4\]"):
        align(one, replace(two, ranks={0: changed}))


def test_no_common_step_says_which_there_are(tmp_path):
    one, two = runs(tmp_path)
    later = replace(two.ranks[0], steps=(-1, 7, 8))
    with pytest.raises(IncomparableError, match=r"found steps 7-8, expected steps 0-1"):
        align(one, replace(two, ranks={0: later}))


@pytest.mark.parametrize("foreign", [True, False])
def test_a_schedule_that_one_framework_lacks_is_said_and_one_that_is_not_stepped_is_a_gap(tmp_path, foreign):
    one, two = runs(tmp_path)
    count = replace(
        one.ranks[0].records[-1],
        seq=len(one.ranks[0].records),
        key=RecordKey(
            step=1, phase=Phase.OPTIMIZER, fqn=SCHEDULE, role=Role.HYPERPARAMETER, slot="num_steps"
        ),
    )
    rank = replace(one.ranks[0], records=(*one.ranks[0].records, count))
    names = ("torch", "mindspore") if foreign else ("torch", "torch")
    one, two = (
        replace(run, ranks=ranks, manifest={**run.manifest, "framework": {"name": name}})
        for run, ranks, name in ((one, {**one.ranks, 0: rank}, names[0]), (two, two.ranks, names[1]))
    )
    alignment = align(one, two)
    assert [u.key.fqn for u in alignment.unmatched] == ([] if foreign else [SCHEDULE])
    assert any("1 records of its count not compared" in note for note in alignment.notes) is foreign
