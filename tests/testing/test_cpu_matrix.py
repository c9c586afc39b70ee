"""The unmodified ``megatron.training`` under the CPU layer, in every parallel configuration that it is for.

Minutes long. Losses are compared as Megatron prints them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from preloaded import run_training

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.testing import cpu
from mindspeed_precision.testing.demo.arguments import demo_arguments
from mindspeed_precision.testing.demo.launch import SCRIPT, LogRow
from mindspeed_precision.testing.demo.launch import run_training as launched

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

Rows = tuple[LogRow, ...]
NCCL = ("--distributed-backend", "nccl")

# name: (processes, options of demo_arguments)
CONFIGURATIONS: dict[str, tuple[int, dict[str, object]]] = {
    "1p": (1, {}),
    "1p dropout 0": (1, {"dropout": 0.0}),
    "1p recompute": (1, {"recompute": True}),
    "1p bf16": (1, {"dtype": "bf16"}),
    "1p fp16": (1, {"dtype": "fp16"}),
    "1p untied": (1, {"untie": True}),
    "1p nccl": (1, {"extra": NCCL}),
    "1p long bf16": (
        1,
        {
            "dtype": "bf16",
            "seq_length": 1280,
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "dropout": 0.0,
            "iterations": 3,
        },
    ),
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 sp bf16 untied recompute": (
        2,
        {"tp": 2, "sequence_parallel": True, "dtype": "bf16", "untie": True, "recompute": True},
    ),
    "pp2": (2, {"pp": 2}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "dp2": (2, {}),
    "dp2 overlap": (2, {"overlap": True}),
    "dp2 distopt": (2, {"distributed_optimizer": True}),
    "dp2 distopt overlap": (2, {"distributed_optimizer": True, "overlap": True}),
    "dp2 distopt overlap bf16": (2, {"distributed_optimizer": True, "overlap": True, "dtype": "bf16"}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 pp2 untied sp": (4, {"tp": 2, "pp": 2, "untie": True, "sequence_parallel": True}),
    "ep2": (2, {"ep": 2, "experts": 4}),
    "tp2 ep2 sp": (4, {"tp": 2, "ep": 2, "experts": 4, "sequence_parallel": True}),
    "cp2 dropout 0": (2, {"cp": 2, "dropout": 0.0}),
    "tp2 cp2 sp": (4, {"tp": 2, "cp": 2, "sequence_parallel": True, "dropout": 0.0}),
}
NEWER = ("tp2 sp", "dp2 distopt overlap bf16", "pp2 vpp2", "ep2", "cp2 dropout 0", "tp2 pp2")
LONG = (
    *("1p fp16", "1p long bf16", "tp2", "tp2 sp bf16 untied recompute", "pp2", "dp2 overlap"),
    *("tp2 pp2", "tp2 ep2 sp", "tp2 cp2 sp"),
)
"""What others in `make test` stand for: `tp2 pp2 untied sp` for four processes, and so on."""

# equal work in another order of sums, as (one, other, relative difference of the printed loss)
SAME_LOSS = (
    ("1p dropout 0", "cp2 dropout 0", 2e-6),
    pytest.param("dp2", "dp2 overlap", 0.0, marks=pytest.mark.long),
    ("dp2", "dp2 distopt", 2e-5),  # float32 torch.norm differs, and clipping passes it on
    ("dp2 distopt", "dp2 distopt overlap", 0.0),
    ("1p", "1p recompute", 0.0),
)

# piece: (version, processes, options, what the run says without it)
ABLATIONS: dict[str, tuple[str, int, dict[str, object], str]] = {
    "factory_device": ("0.17.1", 1, {}, "CUDA"),
    "tensor_moves": ("0.17.1", 1, {}, "Invalid device, must be cuda device"),
    "tensor_type_names": ("0.17.1", 1, {}, "AssertionError"),
    "cuda_device": ("0.17.1", 1, {}, "Megatron requires CUDA"),
    "cuda_generator": ("0.17.1", 1, {}, "_cuda_getDevice"),
    "cuda_streams": ("0.17.1", 1, {}, "torch.cuda.Stream requires CUDA support"),
    "prebuilt_helpers": ("0.17.1", 1, {}, "no makefile found"),
    "cuda_properties": ("0.17.1", 2, {"tp": 2}, "_get_device_properties"),
    "environment": ("0.17.1", 2, {"tp": 2}, "CUDA_DEVICE_MAX_CONNECTIONS"),
    "sequence_parallel_norm": (
        "0.17.1",
        2,
        {"tp": 2, "sequence_parallel": True},
        "sequence parallel not supported by torch LayerNorm",
    ),
    "context_parallel_attention": (
        "0.17.1",
        2,
        {"cp": 2, "dropout": 0.0},
        "only supported by TEDotProductAttention",
    ),
    "split_lists": ("0.17.1", 2, {"ep": 2, "experts": 4}, "all_to_all_single(): incompatible function"),
    "uneven_shards": (
        "0.17.1",
        4,
        {"tp": 2, "ep": 2, "experts": 4, "sequence_parallel": True},
        "invalid tensor size",
    ),
    "gloo_backend": ("0.17.1", 1, {"extra": NCCL}, "doesn't have NCCL built in"),
    "core_loop": ("0.12.1", 1, {}, "No module named 'megatron.training'"),
    "triton_stand_in": ("0.19.2", 1, {}, "No module named 'triton'"),
    "typing_override": ("0.19.2", 1, {}, "cannot import name 'override' from 'typing'"),
}
# the same with CpuTrainer, for versions without megatron.training
CORE_ABLATIONS: dict[str, tuple[str, int, dict[str, object], str]] = {
    "router_gemm": ("0.16.1", 1, {"experts": 4}, "name 'te_general_gemm' is not defined"),
    "no_fp8_shards": (
        "0.12.1",
        2,
        {"distributed_optimizer": True},
        "Invalid Transformer Engine version for FP8 distributed optimizer",
    ),
}
EXPLAINED_ELSEWHERE = {
    "loader_randomness": "silent: test_cpu_traps",
    "send_alias": "silent: test_cpu_traps",
    "fused_kernels": "in no wheel: test_cpu_pieces",
}


@pytest.fixture(scope="session")
def trained(megatron: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rows]:
    """Return a function that trains a configuration once per session and gives its log's rows."""
    known: dict[tuple[str, str], Rows] = {}
    folder = tmp_path_factory.mktemp("matrix")

    def train(name: str, version: str = "0.17.1") -> Rows:
        if (name, version) not in known:
            processes, options = CONFIGURATIONS[name]
            known[name, version] = run_training(
                SCRIPT,
                demo_arguments(**options),
                processes=processes,
                megatron=megatron(version),
                log=folder / version / f"{name}.txt",
            ).rows
        return known[name, version]

    return train


def assert_learns(rows: Rows) -> None:
    losses = [float(row.loss) for row in rows]
    assert len(rows) >= 3
    assert [row.iteration for row in rows] == list(range(1, len(rows) + 1))
    assert 4.0 < losses[-1] < losses[0] < 6.0  # false for NaN
    assert all(0.1 < float(row.grad_norm) < 10 for row in rows)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CONFIGURATIONS],
)
def test_it_trains(name, trained):
    assert_learns(trained(name))


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.18.2", "0.19.2"])
@pytest.mark.parametrize("name", NEWER)
def test_it_trains_on_newer_generations(name, version, trained):
    assert_learns(trained(name, version))


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.18.2", "0.19.2"])
def test_the_generations_print_the_same_numbers(version, trained):
    assert trained("1p") == trained("1p", version)


@pytest.mark.parametrize(("one", "other", "tolerance"), SAME_LOSS)
def test_the_same_work_gives_the_same_loss(one, other, tolerance, trained):
    losses = [[float(row.loss) for row in trained(name)] for name in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance, abs=0)


def test_a_script_that_asks_for_nccl_gets_the_same(trained):
    assert trained("1p nccl") == trained("1p")


def test_other_work_gives_another_loss(trained):
    """The comparison above can fail: dropout, untied weights and two replicas are seen in what is printed."""
    assert len({trained(name) for name in ("1p", "1p dropout 0", "1p untied", "dp2", "1p bf16")}) == 5


@pytest.mark.long
def test_interleaved_stages_repeat_themselves(trained, megatron, tmp_path):
    """What ``send_alias`` is for: without it, each run of this configuration gave other numbers."""
    processes, options = CONFIGURATIONS["pp2 vpp2"]
    again = run_training(
        SCRIPT,
        demo_arguments(**options),
        processes=processes,
        megatron=megatron("0.17.1"),
        log=tmp_path / "again.txt",
    )
    assert again.rows == trained("pp2 vpp2")


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.long),
        pytest.param(1, {"dtype": "bf16"}, marks=pytest.mark.long),
        (2, {"tp": 2}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(processes, options, megatron, tmp_path):
    """Stop and save after two of five steps (``--ckpt-format torch``), load, go on: the same numbers."""

    def train(name: str, *extra: str) -> Rows:
        return run_training(
            SCRIPT,
            demo_arguments(extra=("--ckpt-format", "torch", *extra), **options),
            processes=processes,
            megatron=megatron("0.17.1"),
            log=tmp_path / f"{name}.txt",
        ).rows

    checkpoint = str(tmp_path / "checkpoint")
    whole = train("whole")
    first = train("first", "--save", checkpoint, "--save-interval", "2", "--exit-interval", "2")
    second = train("second", "--load", checkpoint)
    assert [[row.iteration for row in rows] for rows in (first, second)] == [[1, 2], [3, 4, 5]]
    assert first == whole[:2]
    assert [row.grad_norm for row in second] == [row.grad_norm for row in whole[2:]]
    # the second line of a run shows the mean of its first two steps (LogRow)
    assert (second[0], second[2]) == (whole[2], whole[4])


@pytest.mark.long
@pytest.mark.parametrize("name", ABLATIONS)
def test_a_piece_is_needed(name, megatron, tmp_path):
    version, processes, options, says = ABLATIONS[name]
    with pytest.raises(ExternalCommandError):
        launched(
            SCRIPT,
            demo_arguments(**options),
            processes=processes,
            megatron=megatron(version),
            log=tmp_path / "log.txt",
            without=[name],
        )
    assert says in (tmp_path / "log.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("name", CORE_ABLATIONS)
def test_a_piece_is_needed_by_the_core(name, megatron, scripts, tmp_path):
    version, processes, settings, says = CORE_ABLATIONS[name]
    arguments = [json.dumps(settings), "1", str(tmp_path)]

    def train(log: str, *without: str) -> None:
        launched(
            scripts / "train_core.py",
            arguments,
            processes=processes,
            megatron=megatron(version),
            log=tmp_path / log,
            without=without,
        )

    train("with.txt")
    with pytest.raises(ExternalCommandError):
        train("without.txt", name)
    assert says in (tmp_path / "without.txt").read_text()


CORE_SETTINGS: dict[str, tuple[int, dict[str, object]]] = {
    "1p": (1, {"microbatches": 4}),
    "dp2": (2, {"microbatches": 2}),
    "cp2": (2, {"microbatches": 4, "cp": 2}),
    "dp2 distopt overlap bf16": (2, {"distributed_optimizer": True, "overlap": True, "dtype": "bf16"}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True, "dropout": 0.1}),
    "pp2": (2, {"pp": 2}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "ep2": (2, {"ep": 2, "experts": 4}),
}


@pytest.fixture(scope="session")
def core_trained(
    megatron: Callable[[str], Path], scripts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[dict[str, object]]]:
    """Return a function that runs ``CpuTrainer`` under torchrun and gives the report of each rank."""
    folder = tmp_path_factory.mktemp("core")
    known: dict[tuple[str, str], list[dict[str, object]]] = {}

    def train(name: str, version: str) -> list[dict[str, object]]:
        if (name, version) not in known:
            processes, settings = CORE_SETTINGS[name]
            out = folder / version / name
            run_training(
                scripts / "train_core.py",
                [json.dumps(settings), "3", str(out)],
                processes=processes,
                megatron=megatron(version),
                log=out / "log.txt",
            )
            known[name, version] = [
                json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)
            ]
        return known[name, version]

    return train


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.12.1", "0.16.1"])  # the others are covered by their own pretrain
@pytest.mark.parametrize("name", CORE_SETTINGS)
def test_the_core_trainer_trains(name, version, core_trained):
    ranks = core_trained(name, version)
    losses = next(rank["losses"] for rank in reversed(ranks) if rank["losses"][0] is not None)
    assert 4.0 < losses[-1] < losses[0] < 6.0
    assert len({tuple(rank["grad_norms"]) for rank in ranks}) == 1
    assert all(0 < norm < 10 for norm in ranks[0]["grad_norms"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp2", "cp2"])
def test_the_core_trainer_divides_the_work_and_keeps_it(name, core_trained):
    alone, divided = core_trained("1p", "0.16.1")[0], core_trained(name, "0.16.1")[0]
    assert divided["losses"] == pytest.approx(alone["losses"], rel=2e-6)
    assert divided["grad_norms"] == pytest.approx(alone["grad_norms"], rel=2e-5)


@pytest.mark.long
def test_five_versions_of_the_core_give_the_same_bits(core_trained):
    reports = [core_trained("1p", version) for version in ("0.12.1", "0.16.1", "0.17.1", "0.18.2", "0.19.2")]
    assert all(report == reports[0] for report in reports)


def test_every_needed_piece_is_shown_to_be_needed():
    """A piece without an ablation, or an ablation of a piece that is gone, is an error here."""
    needed = {piece.name for piece in cpu.PIECES if not piece.optional}
    assert needed == {*ABLATIONS, *CORE_ABLATIONS, *EXPLAINED_ELSEWHERE}
