"""A run checked in parts says what it says in memory: whoever works, and whatever breaks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.dump.format import COMPLETE, INDEX
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.engines import Resources
from mindspeed_precision.errors import DumpError, PrecisionError
from mindspeed_precision.records import Finding, Level, Role, Severity
from mindspeed_precision.testing.celled import by_rank, in_cells, in_memory, left_out, said, smallest
from mindspeed_precision.testing.fake_runs import (
    LINEAR,
    constant,
    nudged,
    permuted,
    plant,
    scaled,
    transposed_layout,
    write_fake_run,
)
from mindspeed_precision.testing.scale_runs import Fault, ScaleRun, write_scale_run
from mindspeed_precision.verify.cells.plan import mebibytes, needed, plan, slices
from mindspeed_precision.verify.cells.work import _sliced
from mindspeed_precision.verify.check import check_run
from mindspeed_precision.verify.invariants import INVARIANTS
from mindspeed_precision.verify.registry import Answer, Checks
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import Span, each_rank, whole_run

RUN = {"tp": 2, "pp": 2, "dp": 3}
WEIGHT = f"{LINEAR}.weight"
LAYERNORM = "decoder.layers.0.input_layernorm.weight"

PLANTS = {
    "nothing": ([], set()),
    "dW of a rank": (
        [plant(role="wgrad", phase="wgrad", fqn=LINEAR, rank=2, value=scaled(2))],
        {"wgrad.not_the_product"},
    ),
    "sums of two ranks": (
        [
            plant(role="main_grad", slot="after", fqn=WEIGHT, rank=rank, step=3 - rank, recorded=scaled(2))
            for rank in (1, 2)
        ],
        {"accumulate.not_the_sum", "reduce.not_the_sum"},
    ),
    "reduction of a rank": (
        [plant(role="reduced_grad", step=1, rank=2, value=scaled(2))],
        {"reduce.not_the_sum", "parallel.replicas_differ"},
    ),
    "one batch for all": (
        [plant(role="batch", slot="tokens", step=0, value=lambda tokens: tokens * 0 + 1)],
        set(),
    ),
    "batches of a rank": ([plant(role="batch", slot="tokens", rank=1, value=permuted())], set()),
    "NaN": (
        [plant(role="output", fqn=LINEAR, rank=2, step=1, microbatch=0, value=constant(np.nan))],
        {"nonfinite.first"},
    ),
    "learning rate": ([plant(role="hyperparameter", slot="lr", recorded=scaled(0))], {"vacuous.lr_zero"}),
    "weight decay": (
        [plant(role="hyperparameter", slot="weight_decay", step=1, recorded=scaled(2))],
        {"config.not_in_effect"},
    ),
    "one that a rank lacks": ([plant(role="wgrad", fqn=WEIGHT, rank=1, drop=True)], set()),
    "norm of a rank": (
        [plant(role="grad_norm", step=0, rank=1, recorded=scaled(1.01))],
        {"parallel.replicas_differ"},
    ),
    "layout of a rank": (
        [plant(role="grad_output", phase="wgrad", fqn=LINEAR, rank=1, layout=transposed_layout)],
        {"layout.differs_between_ranks"},
    ),
    "a stale sum": (
        [plant(role="main_grad", slot="before", fqn=WEIGHT, microbatch=1, rank=2, recorded=nudged())],
        {"accumulate.changed_between"},
    ),
    "a parameter that stays": (
        [
            plant(role="param", phase="optimizer", fqn=WEIGHT, rank=rank, recorded=scaled(0))
            for rank in (0, 2)
        ],
        {"optimizer.parameters_unmoved"},
    ),
    "no gradient": (
        [plant(role="reduced_grad", fqn=WEIGHT, recorded=scaled(0))],
        {"symptom.zero_gradient"},
    ),
}


@pytest.fixture(scope="module")
def scale_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scale_run(
        tmp_path_factory.mktemp("scale") / "run", ScaleRun(**RUN, fault=Fault(step=1, dp=1))
    )


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_is_found_in_parts_as_in_memory(tmp_path, name):
    plants, ids = PLANTS[name]
    run = write_fake_run(tmp_path / "run", ranks=3, steps=3, level=Level.TENSOR, plants=plants)
    answer = in_cells(run)
    assert said(answer) == said(in_memory(run))
    assert {one.id for one in answer.findings} >= ids
    if name == "nothing":
        assert not answer.findings


def test_a_run_of_several_stages_says_in_parts_what_it_says_in_memory(scale_run):
    whole, small = in_memory(scale_run), plan(scale_run, range(12), Resources()).replica
    assert said(in_cells(scale_run)) == said(in_cells(scale_run, memory=small)) == said(whole)
    assert {one.name: one.exercised for one in whole.outcomes}["parallel.replicas_differ"] > 100
    planned = plan(scale_run, range(12), Resources(memory=small))
    assert {cell.ranks for cell in planned.cells} == {(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)}
    assert f"--memory is {mebibytes(small)}" in in_cells(scale_run, memory=small).notes[0]


def changed(run: Path, rank: int, *words: str) -> None:
    """Give the first record of a rank in whose line all words are other bits, and seal its index anew."""
    directory = run / f"rank{rank:05}"
    lines = (directory / INDEX).read_text().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if all(word in line for word in words))
    lines[number] = re.sub('"fingerprint":"[0-9a-f]{8}', '"fingerprint":"deadbeef', lines[number])
    data = "".join(lines).encode()
    (directory / INDEX).write_bytes(data)
    seal = json.loads((directory / COMPLETE).read_text())
    seal["digest"] = hashlib.blake2b(data, digest_size=16).hexdigest()
    (directory / COMPLETE).write_text(json.dumps(seal) + "\n")


@pytest.mark.parametrize(
    "faults",
    [
        [(5, '"step":1', "reduced_grad", "input_layernorm")],
        [(9, '"step":1', '"role":"param"'), (2, '"step":0', '"role":"exp_avg"')],
        [(3, '"step":1', '"role":"wgrad"', LAYERNORM), (4, '"step":1', "reduced_grad", "pre_mlp")],
        [(3, '"step":1', '"role":"wgrad"', LAYERNORM), (3, '"step":1', "reduced_grad", LAYERNORM)],
        [(7, '"step":1', '"slot":"lr"'), (0, '"step":0', '"role":"grad_norm"')],
    ],
)
def test_copies_that_differ_are_placed_in_parts_as_in_memory(tmp_path, faults):
    run = write_scale_run(tmp_path / "run", ScaleRun(**RUN))
    for rank, *words in faults:
        changed(run, rank, *words)
    answer, whole = in_cells(run), in_memory(run)
    assert "parallel.replicas_differ" in {one.id for one in whole.findings}
    assert said(answer) == said(whole)


def test_a_replica_that_memory_does_not_hold_is_left_out_by_name(scale_run):
    answer = in_cells(scale_run, memory=by_rank(scale_run))
    left = {one.name for one in answer.outcomes if "--memory" in one.skipped}
    linked = {check.ids[0] for check in INVARIANTS if any(part.span is Span.REPLICA for part in check.span)}
    assert left == linked
    whole = in_memory(scale_run)
    assert said(answer, but=frozenset(left)) == said(whole, but=frozenset(left))
    assert "12 ranks" in answer.notes[0]


def test_a_rank_that_memory_does_not_hold_is_loaded_all_the_same(tmp_path):
    run = write_fake_run(tmp_path / "run", ranks=2, level=Level.TENSOR)
    answer = in_cells(run, memory=1000)
    assert not left_out(answer)
    assert said(answer) == said(in_memory(run))


def test_stages_are_taken_apart_by_their_modules(scale_run, monkeypatch):
    monkeypatch.setattr("mindspeed_precision.verify.cells.lead.slices", lambda records, resources: 5)
    answer = in_cells(scale_run)
    assert "2 pipeline stages in 10 parts" in answer.notes[0]
    assert said(answer) == said(in_memory(scale_run))
    assert slices(1_000_000, Resources(memory=1 << 30)) == 6


def test_copies_of_a_parameter_and_records_of_a_module_are_not_taken_apart(tmp_path, scale_run):
    rank = load_run(scale_run).ranks[0]
    tied = replace(rank.parameters[0], fqn="output_layer.weight", tied_to="embedding.words.weight")
    rank = replace(rank, parameters=(*rank.parameters, tied))
    like = rank.records[0]
    names = [("embedding.words.weight", Role.PARAM), ("output_layer.weight", Role.REDUCED_GRAD)]
    names += [("embedding.words", Role.OUTPUT), ("embedding.words.bias_of_words", Role.BUFFER)]
    records = [replace(like, key=replace(like.key, fqn=fqn, role=role)) for fqn, role in names]
    held = [[_sliced(rank, index, 7)(record) for record in records] for index in range(7)]
    assert sorted(held) == [[False] * 4] * 6 + [[True] * 4]


def test_several_workers_give_the_answer_of_one(scale_run):
    assert in_cells(scale_run, jobs=2) == in_cells(scale_run, jobs=1)


def test_a_worker_that_is_killed_changes_nothing(scale_run):
    killed: list[int] = []

    def kill_one(stage: str, done: int, total: int | None) -> None:
        if stage == "checking ranks" and done == 1 and not killed:
            import multiprocessing

            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    limits = Resources(memory=smallest(scale_run), jobs=2)
    assert check_run(scale_run, resources=limits, progress=kill_one) == in_cells(scale_run)
    assert killed


def test_the_workers_of_dask_give_the_same_answer(scale_run):
    pytest.importorskip("distributed", reason="dask is an extra: pip install .[dask]")
    assert in_cells(scale_run, dask="local", jobs=2) == in_cells(scale_run)


def test_a_run_that_stopped_is_asked_again_where_its_ranks_know_less(tmp_path):
    run = write_fake_run(tmp_path / "run", ranks=3, steps=3, level=Level.TENSOR)
    index, stages = run / "rank00001" / INDEX, []
    (run / "rank00001" / COMPLETE).unlink()
    lines = index.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"kind":"step"' in line)
    index.write_text("".join(lines[:last]))
    limits = Resources(memory=smallest(run), jobs=1)
    answer = check_run(run, resources=limits, progress=lambda stage, done, total: stages.append(stage))
    assert "checking again" in stages
    assert said(answer) == said(in_memory(run))
    assert "coverage.run_stopped" in {one.id for one in answer.findings}


def test_ranks_that_wrote_nothing_and_that_are_missing_are_told(tmp_path):
    run = write_fake_run(tmp_path / "run", ranks=4, level=Level.TENSOR)
    for file in (run / "rank00001").iterdir():
        file.unlink()
    for file in (run / "rank00003").iterdir():
        file.unlink()
    (run / "rank00003").rmdir()
    assert said(in_cells(run)) == said(in_memory(run))
    assert load_run(run).notes == in_cells(run).notes[1:]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_that_was_changed_is_one_clear_error(tmp_path, jobs):
    run = write_scale_run(tmp_path / "run", ScaleRun(tp=1, pp=1, dp=3))
    index = run / "rank00002" / INDEX
    index.write_bytes(index.read_bytes().replace(b'"slot":"lr"', b'"slot":"xx"'))
    with pytest.raises(DumpError, match="changed since it was sealed"):
        in_cells(run, jobs=jobs)


def test_what_laws_of_the_whole_run_need_is_bounded_and_what_is_left_out_is_told(scale_run, monkeypatch):
    monkeypatch.setattr("mindspeed_precision.verify.cells.gathering.PER_RECORD", 1 << 20)
    answer = in_cells(scale_run)
    left = {one.name: one.skipped for one in answer.outcomes if "--memory" in one.skipped}
    assert "loss.step_not_the_mean" in left
    assert "GiB" in next(iter(left.values())) or "MiB" in next(iter(left.values()))
    of_the_run = {check.ids[0] for check in INVARIANTS if any(part.span is Span.RUN for part in check.span)}
    assert left.keys() < of_the_run
    but = frozenset(left)
    assert said(answer, but=but) == said(in_memory(scale_run), but=but)


def test_the_command_says_in_which_parts_it_checked(scale_run, capsys):
    words = ["check", str(scale_run), "--json", "--memory", str(smallest(scale_run)), "--jobs", "1"]
    main(words)
    told = json.loads(capsys.readouterr().out)
    assert "3 data-parallel replicas of 4 ranks" in told["notes"][0]
    main([*words[:2], *words[3:]])
    assert "checked in parts" in capsys.readouterr().out
    main([*words[:3], "--memory", str(needed(scale_run))])
    plain = json.loads(capsys.readouterr().out)
    assert not plain["notes"]
    assert {**told, "notes": []}["outcomes"] == plain["outcomes"]


def test_a_law_that_does_not_say_which_ranks_it_links_cannot_be_registered():
    checks: Checks[RunFacts] = Checks(spanned=True)
    with pytest.raises(TypeError, match=r"mine\.law: which ranks does it link"):
        checks.register("mine.law", holds="nothing", unit="things")(lambda facts: Answer(exercised=0))
    with pytest.raises(TypeError, match="which ranks"):
        INVARIANTS.register("mine.law", holds="nothing", unit="things")


def test_every_part_of_a_law_says_what_it_reads_of_more_than_a_replica():
    for check in INVARIANTS:
        spans = [part.span for part in check.span]
        assert spans, check.ids
        for part in check.span:
            assert (part.reads is None) == (part.span in (Span.RANK, Span.REPLICA)), check.ids


def registered(monkeypatch, span):
    """Register a law that always finds something, for this process alone."""
    finding = Finding(id="mine.law", severity=Severity.WARNING, confidence=1.0, title="mine")
    monkeypatch.setattr(INVARIANTS, "_checks", list(INVARIANTS))
    INVARIANTS.register("mine.law", holds="nothing", unit="things", span=[span])(
        lambda facts: Answer(exercised=len(facts.ranks), findings=(finding,))
    )


def test_a_law_of_ones_own_is_asked_in_parts(scale_run, monkeypatch):
    registered(monkeypatch, whole_run())
    answer = in_cells(scale_run)
    assert (answer.outcomes[-1].name, answer.outcomes[-1].exercised) == ("mine.law", 12)
    assert said(answer) == said(in_memory(scale_run))
    with pytest.raises(PrecisionError, match="know other laws"):
        in_cells(scale_run, jobs=2)


def test_a_law_of_single_ranks_must_say_when_it_sees_something(scale_run, monkeypatch):
    registered(monkeypatch, each_rank())
    assert "mine.law" in {one.id for one in in_memory(scale_run).findings}
    with pytest.raises(TypeError, match=r"mine\.law: .*seen_first"):
        in_cells(scale_run)
