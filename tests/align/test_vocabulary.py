"""Vocabularies that two runs pad otherwise: what is compared are the rows that both have."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_layout import PARAM, REDUCED, Rank, split, write

from mindspeed_precision.align import align
from mindspeed_precision.align.state import RecordedStates
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.fingerprint import fingerprints
from mindspeed_precision.records import RankCoordinates, Role, Verdict

EMBEDDING = "embedding.word_embeddings.weight"
ENTRIES, WIDTH = 10, 3


def values(rows, kind=0):
    """Return ``[rows, WIDTH]``: the entries are the same whatever the padding, which is of its own."""
    entries = np.random.default_rng(kind).normal(size=(ENTRIES, WIDTH))
    padding = np.random.default_rng(1000 + rows).normal(size=(rows - ENTRIES, WIDTH))
    return np.concatenate([entries, padding]).astype(np.float32)


def padded(directory, rows, *, tp=1, size=ENTRIES, tokenizer=None, keep=True, wrong=None):
    ranks = []
    for t in range(tp):
        placement = split(t, tp, shape=(rows, WIDTH))
        rank = Rank(RankCoordinates(rank=t, world_size=tp, tp_rank=t, tp_size=tp), {EMBEDDING: placement})
        for number, kind in enumerate((PARAM, REDUCED)):
            whole = values(rows, number)
            if wrong is not None and kind == REDUCED:
                whole[wrong] += 1
            rank.add(EMBEDDING, kind, whole, keep=keep)
        ranks.append(rank)
    write(directory, ranks)
    manifest = json.loads((directory / "run.json").read_text())
    manifest["settings"] = {"vocab_size": size}
    manifest["config"] = {"vocabulary": {"size": tokenizer}} if tokenizer else {}
    (directory / "run.json").write_text(json.dumps(manifest))
    return load_run(directory)


@pytest.mark.parametrize(("tp", "swapped"), [(1, False), (2, False), (2, True)])
def test_the_rows_that_both_have_are_compared(tp, swapped, tmp_path):
    runs = [padded(tmp_path / "one", 12), padded(tmp_path / "two", 16, tp=tp)]
    alignment = align(*(reversed(runs) if swapped else runs))
    assert {pair.key.role for pair in alignment.pairs} == {Role.PARAM, Role.REDUCED_GRAD}
    for number, pair in enumerate(alignment.pairs):
        longer, shorter = (pair.baseline, pair.candidate) if swapped else (pair.candidate, pair.baseline)
        assert longer.shape == shorter.shape == (12, WIDTH)
        run = alignment.baseline if swapped else alignment.candidate
        elements = run.ranks[0].payload(longer)
        expected = values(16, number)[:12]
        assert np.array_equal(elements.bits.view(np.float32), expected)
        assert (longer.digest.fingerprint, longer.digest.unordered) == fingerprints(expected.view(np.uint32))
        assert longer.digest.statistics.maximum == expected.max()
    (note,) = [note for note in alignment.notes if "the first 12 are compared, of 10 entries" in note]
    assert ("16 rows in the baseline and to 12" if swapped else "12 rows in the baseline and to 16") in note
    assert not alignment.unruled


def test_entries_agree_and_one_that_does_not_is_found(tmp_path):
    one = padded(tmp_path / "one", ENTRIES)
    healthy = compare_runs(one, padded(tmp_path / "two", 16, tp=2), replay=False)
    assert healthy.status is Verdict.IDENTICAL
    assert healthy.findings == ()
    found = compare_runs(one, padded(tmp_path / "three", 16, tp=2, wrong=9), replay=False)
    first = found.first_divergence
    assert (first.key.fqn, first.key.role, first.held_by) == (EMBEDDING, Role.REDUCED_GRAD, (0, 1))
    (finding,) = [f for f in found.findings if f.id == "config.vocabulary_padding"]
    assert finding.explains == (first.key,)
    assert "padded to 10 rows in the baseline and to 16 in the candidate" in finding.title
    beyond = padded(tmp_path / "four", 16, tp=2, wrong=10)
    assert compare_runs(one, beyond, replay=False).status is Verdict.IDENTICAL


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"size": 0}, "it is not known how many of them are padding"),
        ({"size": 9}, "it is not known how many of them are padding"),
        ({"size": 14}, "it is not known how many of them are padding"),
        ({"keep": False}, "its elements were not kept"),
    ],
)
def test_what_cannot_be_compared_says_why(more, reason, tmp_path):
    one = padded(tmp_path / "one", 12, size=0 if more.get("size") in (0, 14) else ENTRIES)
    alignment = align(one, padded(tmp_path / "two", 16, **more))
    assert not alignment.pairs
    assert len(alignment.unruled) == 2
    assert all(reason in said and "padded to 12 rows" in said for said in alignment.unruled.values())
    assert not alignment.unmatched


def test_the_tokenizer_says_it_too(tmp_path):
    one = padded(tmp_path / "one", 12, size=0)
    alignment = align(one, padded(tmp_path / "two", 16, size=0, tokenizer=ENTRIES))
    assert len(alignment.pairs) == 2


def initial_state(run):
    states = RecordedStates(run)
    return states.before(states.first)


def test_a_start_gives_the_rows_that_it_has(tmp_path):
    start = initial_state(padded(tmp_path / "one", 16, tp=2))
    found = start.parameter(EMBEDDING, shape=(12, WIDTH), dtype="float32")
    assert np.array_equal(found.bits.view(np.float32), values(16))
    silent = initial_state(padded(tmp_path / "two", 16, size=0))
    with pytest.raises(IncomparableError, match=r"found float32\[16, 3\], expected .*\[12, 3\].*vocab_size"):
        silent.parameter(EMBEDDING, shape=(12, WIDTH), dtype="float32")


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.matrix
@pytest.mark.usefixtures("cpu_megatron")
def test_two_trainings_that_pad_otherwise(tmp_path):
    """From one start the entries are equal; then Megatron's softmax sums over other rows, which is said."""
    pytest.importorskip("torch")
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    one, two, alone = (tmp_path / name for name in ("one", "two", "alone"))
    common = ("capture.level=tensor", "capture.collectives=false", "vocab_size=256")
    record_training(TrainerSettings(), one, steps=1, overrides=common)
    record_training(TrainerSettings(padding=16), alone, steps=1, overrides=common)
    record_training(TrainerSettings(padding=16), two, steps=1, overrides=[*common, f"init_from={one}"])
    rows = {name: initial_rows(load_run(tmp_path / name)) for name in ("one", "two", "alone")}
    assert np.array_equal(rows["two"][:256], rows["one"])
    assert np.array_equal(rows["two"][256:], rows["alone"][256:])
    diagnosis = compare_runs(one, two)
    initial = [c for c in diagnosis.comparisons if c.key.step < 0]
    assert {c.verdict for c in initial} == {Verdict.IDENTICAL}
    assert EMBEDDING in {c.key.fqn for c in initial}
    first = diagnosis.first_divergence.key  # what the model returns: the loss of each token
    assert (first.fqn, first.role) == ("", Role.OUTPUT)
    assert diagnosis.findings[0].id == "config.vocabulary_padding"
    assert compare_runs(two, two).findings == ()


def initial_rows(run):
    rank = run.ranks[0]
    record = next(r for r in rank.records if r.key.step < 0 and r.key.fqn == EMBEDDING)
    return rank.payload(record).bits
