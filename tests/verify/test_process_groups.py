"""The groups of collectives against the layout: groups that it has, and groups that it does not have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from run_building import RunBuilder, findings_of, outcome_of, ranks

from mindspeed_precision.record.process_group import group_note, ranks_of_note

LAW = "parallel.foreign_group"
MEGATRON = {"ddp_config": {"num_distributed_optimizer_instances": 1}}


@pytest.mark.parametrize(
    ("group", "note"),
    [
        ((3, 2), "over ranks 2-3"),
        ((0, 1, 2, 3, 8), "over ranks 0-3, 8"),
        ((0, 4, 8, 12), "over ranks 0 to 12 by 4"),
        ((5,), "over ranks 5"),
    ],
)
def test_a_note_says_the_ranks(group, note):
    assert group_note(group) == note
    assert ranks_of_note(note) == tuple(sorted(group))


@pytest.mark.parametrize(
    "note",
    ["", "over ranks", "over ranks 1-", "over ranks 0 to 8 by 0", "a cast", "over ranks 0-99999999999"],
)
def test_another_note_says_none(note):
    assert ranks_of_note(note) == ()


def test_a_group_of_no_order_is_its_size():
    note = group_note([*range(0, 400, 8), *range(1, 400, 8)])
    assert note == "over 100 ranks"
    assert ranks_of_note(note) == ()


def collected(directory, groups, *, coordinates, phase="fprop", config=None, **manifest):
    """Return a run in which each rank calls one collective over the group that ``groups`` has for it."""
    builder = RunBuilder(coordinates, config=MEGATRON if config is None else config, manifest=manifest)
    role = {"fprop": "input", "dgrad": "grad_output", "reduce": "main_grad"}[phase]
    given = np.arange(4, dtype=np.float32)
    for group in groups:
        for rank in group:
            builder.add(role, phase, "linear", given, rank=rank, slot="all_reduce", note=group_note(group))
    return builder.write(directory)


def experts(tp, ep, world):
    """Return ranks of a mixture whose experts are split by ``ep``, and as all else by ``tp``."""
    found = ranks(world, tp_size=tp)
    return [replace(at, ep_size=ep, ep_rank=at.rank // tp % ep) for at in found]


def contexts():
    """Return two tensor-, two context- and two data-parallel ranks, in Megatron's order."""
    return [
        replace(
            at,
            tp_rank=at.rank % 2,
            tp_size=2,
            cp_rank=at.rank // 2 % 2,
            cp_size=2,
            dp_rank=at.rank // 4,
            dp_size=2,
        )
        for at in ranks(8)
    ]


HEALTHY = {
    "tp": (ranks(4, tp_size=2), [(0, 1), (2, 3)]),
    "dp": (ranks(4, tp_size=2), [(0, 2), (1, 3)]),
    "tp x dp": (ranks(4, tp_size=2), [(0, 1, 2, 3)]),
    "pp": (ranks(8, tp_size=2, pp_size=2), [(0, 4)]),
    "embeddings": (ranks(4, pp_size=4), [(0, 3)]),
    "alone": (ranks(4, tp_size=2), [(1,)]),
    "cp": (contexts(), [(0, 2), (5, 7)]),
    "tp x cp": (contexts(), [(4, 5, 6, 7)]),
    "cp x dp": (contexts(), [(0, 2, 4, 6)]),
    "ep": (experts(1, 2, 4), [(0, 1), (2, 3)]),
    "copies of experts": (experts(1, 2, 4), [(0, 2), (1, 3)]),
    "tp x ep": (experts(2, 2, 8), [(0, 1, 2, 3), (4, 5, 6, 7)]),
    "ep beside tp": (experts(2, 2, 8), [(0, 2), (5, 7)]),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_groups_of_the_layout(tmp_path, name):
    coordinates, groups = HEALTHY[name]
    run = collected(tmp_path / "run", groups, coordinates=coordinates)
    assert not findings_of(run, LAW)
    outcome = outcome_of(run, LAW)
    assert (outcome.exercised, outcome.skipped) == (sum(map(len, groups)), "")


FOREIGN = {
    "diagonal": (ranks(4, tp_size=2), (0, 3), "error", "2 of 4 ranks of DP x TP"),
    "world over stages": (
        ranks(8, tp_size=2, pp_size=2),
        tuple(range(8)),
        "error",
        "crosses pipeline stages, along DP x PP x TP",
    ),
    "stages askew": (ranks(4, tp_size=2, pp_size=2), (0, 3), "error", "along PP x TP"),
    "half of dp": (ranks(4), (0, 1), "warning", "2 of 4 ranks of DP"),
    "three of tp": (ranks(4, tp_size=4), (0, 1, 2), "warning", "3 of 4 ranks of TP"),
    "three of ep": (experts(1, 4, 8), (0, 1, 2), "warning", "3 of 8 ranks of DP"),
}


@pytest.mark.parametrize("phase", ["fprop", "dgrad", "reduce"])
@pytest.mark.parametrize("name", FOREIGN)
def test_groups_that_the_layout_does_not_have(tmp_path, name, phase):
    coordinates, group, severity, text = FOREIGN[name]
    run = collected(tmp_path / "run", [group], coordinates=coordinates, phase=phase)
    finding = findings_of(run, LAW)[LAW]
    assert finding.severity.value == severity
    assert text in finding.evidence[0]
    assert finding.where.fqn == "linear"
    assert outcome_of(run, LAW).failed == len(group)


@pytest.mark.parametrize(
    ("config", "manifest", "reason"),
    [
        ({"ddp_config": {"num_distributed_optimizer_instances": 2}}, {}, "instances is set"),
        ({"ddp_config": {"x": 1}, "megatron_args": {"use_megatron_fsdp": True}}, {}, "fsdp is set"),
        ({}, {}, "DDP was not recorded"),
        (MEGATRON, {"versions": {"mindspeed": "0.12"}}, "MindSpeed splits"),
        ({**MEGATRON, "megatron_args": {"context_parallel_algo": "hybrid"}}, {}, "MindSpeed splits"),
    ],
)
def test_parts_that_may_be_meant(tmp_path, config, manifest, reason):
    run = collected(tmp_path / "run", [(0, 1)], coordinates=ranks(4), config=config, **manifest)
    assert not findings_of(run, LAW)
    outcome = outcome_of(run, LAW)
    assert outcome.exercised == 0
    assert reason in outcome.skipped


def test_what_is_not_judged_is_said(tmp_path):
    missing = collected(tmp_path / "missing", [(0, 1)], coordinates=ranks(8, tp_size=2)[:4])
    assert "4 ranks did not record" in outcome_of(missing, LAW).skipped
    several = [replace(at, dp_rank=0) for at in ranks(4)]  # two models of layouts of their own
    assert "no grid" in outcome_of(collected(tmp_path / "several", [], coordinates=several), LAW).skipped
    unsaid = RunBuilder(ranks(2, tp_size=2))
    unsaid.add("input", "fprop", "linear", np.ones(4, np.float32), slot="all_reduce")
    assert outcome_of(unsaid.write(tmp_path / "unsaid"), LAW).skipped == (
        "2 collectives: their group was not recorded"
    )
