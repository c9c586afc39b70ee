"""Microbatches of data-parallel ranks, numbered in the whole batch: on runs written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.align import align
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.sketch import ROUNDOFF, pack, sketch_values
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    Side,
    TensorRecord,
    Unplaced,
    Verdict,
)

SPLIT_OTHERWISE = "the batch is split otherwise over the data-parallel ranks"
CONFIG = {"transformer_config": {"calculate_per_token_loss": False, "fp16": False}}


def host(values):
    bits = {"f": np.uint32, "i": np.uint64}[values.dtype.kind]
    return HostTensor(bits=values.view(bits), dtype=str(values.dtype))


def numbers(kind, microbatch):
    return np.random.default_rng([kind, microbatch]).normal(size=(40, 8)).astype(np.float32)


def record(key, values, keep, place=None):
    own = host(values)
    digest = digest_host(own, statistics=True)
    if values.dtype.kind == "f":
        digest = replace(digest, sketch=pack(sketch_values(values), roundoff=ROUNDOFF))
    found = TensorRecord(
        seq=0, key=key, shape=values.shape, dtype=own.dtype, layout=None, digest=digest, place=place
    )
    return found, own if keep else None


def write(
    path, *, dp, total=4, gradient=1.0, config=CONFIG, tokens=lambda n: n, keep=True, place=None, losses=None
):
    """One step of ``total`` microbatches over ``dp`` ranks; losses are divided by the rank's own count.

    ``losses(number, rank, dp)`` gives what a loss function returns, by slot.
    """
    create_run(path, {"config": config})
    own = total // dp
    for rank in range(dp):
        where = RankCoordinates(rank=rank, world_size=dp, dp_rank=rank, dp_size=dp)
        writer = RankWriter(path, coordinates=where)
        found = []
        for local in range(own):
            number = local * dp + rank

            def at(phase, role, fqn="m", slot="0", local=local):
                return RecordKey(step=0, microbatch=local, phase=phase, fqn=fqn, role=role, slot=slot)

            ids = np.full((2, 3), tokens(number), np.int64)
            backward = numbers(1, number) * np.float32(gradient / own)
            found += [
                record(at(Phase.BATCH, Role.BATCH, "batch", "tokens"), ids, keep),
                record(at(Phase.FPROP, Role.OUTPUT), numbers(0, number), keep, place),
                record(at(Phase.DGRAD, Role.GRAD_OUTPUT), backward, keep, place),
            ]
            for slot, value in (losses(number, rank, dp) if losses else {}).items():
                found.append(record(at(Phase.LOSS, Role.LOSS, "loss", slot), np.float32([value]), keep))
        records = [replace(one, seq=seq) for seq, (one, _) in enumerate(found)]
        kept = {seq: elements for seq, (_, elements) in enumerate(found) if elements is not None}
        writer.write_step(0, records, kept, microbatches=own)
        writer.close(complete=True)
    return load_run(path)


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("keep", [True, False])
def test_the_same_microbatch_is_found_and_its_gradient_scaled(dp, keep, tmp_path):
    one, two = write(tmp_path / "one", dp=1, keep=keep), write(tmp_path / "two", dp=dp, keep=keep)
    found = align(one, two)
    assert (found.unruled, found.unmatched, found.replicas) == ({}, (), ())
    assert {(p.key.phase, p.key.microbatch) for p in found.pairs} == {
        (phase, number) for phase in (Phase.BATCH, Phase.FPROP, Phase.DGRAD) for number in range(4)
    }
    assert {p.held_by[Side.CANDIDATE] for p in found.pairs if p.key.microbatch == 1} == {(1,)}
    diagnosis = compare_runs(one, two, policy="cross_layout", replay=False)
    verdicts = {}
    for judged in diagnosis.comparisons:
        verdicts.setdefault(judged.key.phase, set()).add(judged.verdict)
    assert verdicts[Phase.BATCH] == verdicts[Phase.FPROP] == {Verdict.IDENTICAL}
    assert verdicts[Phase.DGRAD] == {Verdict.IDENTICAL if keep else Verdict.WITHIN_TOLERANCE}
    backward = [c for c in diagnosis.comparisons if c.key.phase is Phase.DGRAD]
    assert all(c.metrics.get("norm_change", 0.0) < 1e-12 for c in backward)  # a power of two: exact


def test_what_has_no_rule_in_one_run_has_none_in_the_other(tmp_path):
    """Under the numbers of the whole batch: no microbatch of the other run is left without a partner."""
    unplaced = Unplaced(reason="experts are not placed")
    found = align(write(tmp_path / "one", dp=1), write(tmp_path / "two", dp=2, place=unplaced))
    assert found.unmatched == ()
    assert {key.microbatch for key in found.unruled} == {0, 1, 2, 3}
    assert {p.key.phase for p in found.pairs} == {Phase.BATCH}


def test_a_wrong_factor_is_found(tmp_path):
    one, two = write(tmp_path / "one", dp=1), write(tmp_path / "two", dp=2, gradient=1.5)
    diagnosis = compare_runs(one, two, policy="cross_layout", replay=False)
    first = diagnosis.first_divergence
    assert (first.key.phase, first.key.microbatch) == (Phase.DGRAD, 0)
    assert first.comparison.metrics["scale"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": lambda n: n + (n == 3)},
        {"tokens": lambda n: {0: 0, 1: 2, 2: 1, 3: 3}[n]},
        {"total": 8},
    ],
    ids=["one other sample", "another order", "another size"],
)
def test_what_is_not_known_to_be_the_same_is_not_compared(changes, tmp_path):
    found = align(write(tmp_path / "one", dp=1), write(tmp_path / "two", dp=2, **changes))
    assert not found.pairs
    assert set(found.unruled.values()) == {SPLIT_OTHERWISE}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"transformer_config": {"calculate_per_token_loss": True, "fp16": False}},
        {"transformer_config": {"calculate_per_token_loss": False, "fp16": True}},
    ],
    ids=["no configuration", "per token", "loss scale"],
)
def test_without_a_factor_of_gradients_the_forward_pass_alone_is_compared(config, tmp_path):
    found = align(write(tmp_path / "one", dp=1), write(tmp_path / "two", dp=2, config=config))
    assert {(p.key.phase, p.key.microbatch) for p in found.pairs} == {
        (phase, number) for phase in (Phase.BATCH, Phase.FPROP) for number in range(4)
    }
    assert {key.phase for key in found.unruled} == {Phase.DGRAD}
    assert set(found.unruled.values()) == {SPLIT_OTHERWISE}


def own_report(number, rank, dp):
    """Since 0.13: the report is of this rank's tokens."""
    return {"": 100.0 + number, "lm loss.0": 100.0 + number, "lm loss.1": 64.0}


def summed_report(number, rank, dp):
    """Until 0.12: the loss is this rank's, the report that of all data-parallel ranks."""
    first = number - rank
    return {
        "": 100.0 + number,
        "lm loss.0": sum(100.0 + first + r for r in range(dp)),
        "lm loss.1": 64.0 * dp,
    }


@pytest.mark.parametrize(("losses", "compared"), [(own_report, 12), (summed_report, 4)])
def test_a_report_that_is_summed_over_ranks_is_no_microbatch_of_the_batch(losses, compared, tmp_path):
    one, two = write(tmp_path / "one", dp=1, losses=losses), write(tmp_path / "two", dp=2, losses=losses)
    for pair in ((one, two), (two, one)):
        diagnosis = compare_runs(*pair)
        assert diagnosis.first_divergence is None
        assert (
            sum(c.key.role is Role.LOSS and c.verdict is Verdict.IDENTICAL for c in diagnosis.comparisons)
            == compared
        )
        said = [note for note in diagnosis.notes if "summed over data-parallel ranks" in note]
        assert len(said) == (compared == 4)


def test_a_loss_that_differs_is_found_beside_a_summed_report(tmp_path):
    def wrong(number, rank, dp):
        return {**summed_report(number, rank, dp), "": 100.0 + number + (number == 1)}

    one = write(tmp_path / "one", dp=1, losses=summed_report)
    first = compare_runs(one, write(tmp_path / "two", dp=2, losses=wrong)).first_divergence.key
    assert (first.role, first.slot, first.microbatch) == (Role.LOSS, "", 1)
