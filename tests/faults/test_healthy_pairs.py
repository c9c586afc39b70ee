"""A healthy pair gives no finding, in every parallel layout; and a fault on one rank is found there.

Two runs of the demo's script through the drop-in, on the real ``megatron.training``.
"""

from __future__ import annotations

import pytest

from mindspeed_precision import compare_runs, load_run
from mindspeed_precision.flow import compare_in_full
from mindspeed_precision.records import Phase, Verdict
from mindspeed_precision.testing.folded import folded, told

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

LAYOUTS = {
    # name: (processes, options, further arguments)
    "fp16 with evaluation": (1, {"dtype": "fp16"}, ("--eval-iters", "1", "--eval-interval", "1")),
    "recompute with dropout": (1, {"recompute": True, "dropout": 0.1}, ()),
    "tp2 sp bf16": (2, {"tp": 2, "sequence_parallel": True, "dtype": "bf16"}, ()),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "layers": 4}, ()),
    "dp2 distopt overlap bf16": (
        2,
        {"distributed_optimizer": True, "overlap": True, "dtype": "bf16", "global_batch_size": 8},
        (),
    ),
    "ep2": (2, {"ep": 2, "experts": 4}, ()),
    "cp2": (2, {"cp": 2, "dropout": 0.0}, ()),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}, ()),
}
LONG = ("ep2", "cp2", "tp2 pp2")


def record(megatron, tmp_path, name, layout, *flags):
    from preloaded import run_training

    from mindspeed_precision.testing.demo.arguments import demo_arguments
    from mindspeed_precision.testing.demo.launch import SCRIPT

    processes, options, further = layout
    out = tmp_path / name
    run_training(
        SCRIPT,
        [
            *demo_arguments(**{"iterations": 2, "global_batch_size": 4, **options}),
            *further,
            *("--precision-debug", "--precision-debug-out", str(out), *flags),
        ],
        processes=processes,
        megatron=megatron("0.17.1"),
        log=tmp_path / f"{name}.log",
    )
    return load_run(out)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=pytest.mark.long if name in LONG else ())
        for name, layout in LAYOUTS.items()
    ],
)
def test_a_layout_and_its_repeat(megatron, tmp_path, layout):
    runs = [record(megatron, tmp_path, name, layout) for name in ("baseline", "candidate")]
    for run in runs:
        assert (run.notes, run.manifest["findings"]) == ((), [])
        assert sorted(run.ranks) == list(range(layout[0]))
        assert all(rank.complete and rank.steps == (-1, 0, 1) for rank in run.ranks.values())
        for rank in run.ranks.values():
            keys = [record.key for record in rank.records]
            assert len(keys) == len(set(keys))
    diagnosis = compare_runs(*runs)
    assert diagnosis.status is Verdict.IDENTICAL
    assert (diagnosis.findings, diagnosis.origins, diagnosis.notes) == ((), (), ())
    coverage = diagnosis.coverage
    assert coverage.parameters == coverage.parameters_with_wgrad > 0
    assert coverage.unmatched == 0
    if layout[1].get("distributed_optimizer"):  # each rank has ranges of its own
        less = folded(*(run.path for run in runs))
        assert told(less) == told(compare_in_full(*runs))
        assert less.folded.stand_ins.ranges


def test_collectives_are_recorded_where_they_are_called(megatron, tmp_path):
    run = record(megatron, tmp_path, "run", LAYOUTS["tp2 sp bf16"])
    step = [r for r in run.ranks[0].records if r.key.step == 0]
    gathered = [r for r in step if r.key.slot == "all_gather_into_tensor" and r.key.phase is Phase.FPROP]
    # column-parallel linears gather their input: [tokens / 2, …] in, [tokens, …] out
    inputs = {r.key: r for r in gathered if r.key.role.value == "input"}
    outputs = [r for r in gathered if r.key.role.value == "output"]
    assert "decoder.layers.0.self_attention.linear_qkv" in {key.fqn for key in inputs}
    assert len(inputs) == len(outputs) > 0
    halves = {key.fqn: r.shape[0] for key, r in inputs.items()}
    assert all(r.shape[0] == 2 * halves[r.key.fqn] for r in outputs)
    # what the collective gave back is what the GEMM multiplied
    operand = next(
        r
        for r in step
        if (r.key.phase, r.key.role.value, r.key.fqn)
        == (Phase.WGRAD, "input", "decoder.layers.0.mlp.linear_fc1")
    )
    given = next(r for r in outputs if r.key.fqn == operand.key.fqn and r.key.microbatch == 0)
    assert given.digest.fingerprint == operand.digest.fingerprint
    # norms are shared by the tensor-parallel ranks: their gradients are reduced at the end
    reduced = [r for r in step if r.key.phase is Phase.REDUCE and r.key.fqn == "collective"]
    assert {r.key.slot for r in reduced} >= {"all_reduce"}


def test_settings_choose_steps_and_ranks(megatron, tmp_path):
    run = record(
        megatron,
        tmp_path,
        "run",
        (2, {"tp": 2, "iterations": 3}, ()),
        *("--precision-debug-set", "steps=1", "ranks=1"),
    )
    assert sorted(run.ranks) == [1]
    assert run.ranks[1].steps == (-1, 1)
    assert run.notes == ()
