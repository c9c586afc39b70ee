"""``check`` on real trainings of megatron-core, without a second run: each fault, and its healthy twin."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mindspeed_precision.verify.check import check_run

SCRIPT = Path(__file__).parent / "scripts" / "record_run_faults.py"
VERSION = "0.17.1"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, and what is found in it.

    Attributes:
        processes: how many.
        settings: of the trainer.
        fault: in the script; empty: none.
        found: ids that must be found, the cause first.
        where: step, microbatch and name of the first; None: anywhere, or of any name.
        often: tried by ``make test``; else by ``make long``.
        healthy: what the script puts in is no fault.
    """

    processes: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    found: tuple[str, ...] = ()
    where: tuple[int, int, str | None] | None = (0, 0, None)
    often: bool = True
    healthy: bool = False


TP, SP, PP, RECOMPUTE = {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"recompute": True}
DROPOUT, MIXTURE = {"dropout": 0.1}, {"experts": 4}
REPLICAS = "parallel.replicas_differ"
CASES = {
    "tp": Case(processes=2, settings={**TP, **DROPOUT}),
    "sp": Case(processes=2, settings=SP, often=False),
    "sp bf16 swiglu": Case(
        processes=2,
        settings={
            **SP,
            "dtype": "bf16",
            "swiglu": True,
            "rmsnorm": True,
            "untie": True,
            **RECOMPUTE,
            **DROPOUT,
        },
        often=False,
    ),
    "pp": Case(processes=2, settings={**PP, **RECOMPUTE, **DROPOUT}, often=False),
    "vpp": Case(processes=2, settings={**PP, "vpp": 2, "layers": 4}, often=False),
    "dp": Case(processes=2, settings={"distributed_optimizer": True}, often=False),
    "dp overlap": Case(processes=2, settings={"distributed_optimizer": True, "overlap": True}, often=False),
    "ep": Case(processes=2, settings={**MIXTURE, "ep": 2}, often=False),
    "sp ep": Case(processes=2, settings={**SP, **MIXTURE, "ep": 2, "etp": 1}, often=False),
    "cp": Case(processes=2, settings={"cp": 2}, often=False),
    "one": Case(settings={**RECOMPUTE, **DROPOUT}),
    "one fp16": Case(settings={"dtype": "fp16"}, often=False),
    "one mixture": Case(settings=MIXTURE, often=False),
    "tp noncontiguous": Case(
        processes=2,
        settings=TP,
        fault="noncontiguous_gradient",
        found=("reduce.result_discarded", REPLICAS),
        where=(0, 0, "decoder.final_layernorm"),
    ),
    "tp gathered logits": Case(
        processes=2,
        settings=TP,
        fault="gathered_logits",
        found=("reduce.copies_summed",),
        where=(0, 0, ""),
        often=False,
    ),
    "tp one seed": Case(
        processes=2,
        settings={**TP, **DROPOUT},
        fault="one_seed",
        found=("rng.equal_in_tensor_group",),
        where=(0, -1, "rng"),
        often=False,
    ),
    "tp seeds apart": Case(
        processes=2,
        settings={**TP, **DROPOUT},
        fault="apart_seeds",
        found=("rng.differs_in_tensor_group", REPLICAS),
        where=(0, -1, "rng"),
        often=False,
    ),
    "tp lost row": Case(
        processes=2,
        settings=TP,
        fault="lost_token",
        found=("fprop.zero_rows",),
        where=(0, 0, "embedding.word_embeddings"),
        often=False,
    ),
    "sp norm": Case(
        processes=2,
        settings=SP,
        fault="unreduced_norm",
        found=(REPLICAS,),
        where=(0, -1, "decoder.layers.1.input_layernorm.weight"),
    ),
    "pp embedding": Case(
        processes=2,
        settings=PP,
        fault="unreduced_embedding",
        found=(REPLICAS,),
        where=(0, -1, "embedding.word_embeddings.weight"),
    ),
    "pp global": Case(
        processes=2,
        settings={**PP, **RECOMPUTE},
        fault="mask_of_the_last_microbatch",
        found=("fprop.recomputed_differs",),
        often=False,
    ),
    "pp transfer": Case(
        processes=2,
        settings=PP,
        fault="lossy_transfer",
        found=("parallel.stage_received_other",),
        where=(0, 0, "decoder.layers.1"),
        often=False,
    ),
    "dp same data": Case(
        processes=2, fault="same_data", found=("data.repeated_in_step",), where=(0, 0, "batch"), often=False
    ),
    "one nan": Case(fault="nan_in_a_layer", found=("nonfinite.first",), where=(1, 0, "decoder.layers.1.mlp")),
    "one random states": Case(
        settings={**RECOMPUTE, **DROPOUT}, fault="random_states_stay", found=("fprop.recomputed_differs",)
    ),
    "one doubled": Case(fault="doubled_after_the_loss", found=("loss.gradient_scaled",), where=(0, 0, "")),
    "one short": Case(
        fault="short_second_microbatch", found=("loss.microbatches_weighted_unequally",), where=(0, 0, "")
    ),
    "one shifted": Case(
        fault="shifted_loss", found=("loss.not_of_token_losses",), where=(0, 0, "loss"), often=False
    ),
    "one twice": Case(fault="one_microbatch_twice", found=("data.repeated_in_step",), where=(0, 1, "batch")),
    "one again": Case(
        fault="first_batch_again", found=("data.repeated",), where=(1, 0, "batch"), often=False
    ),
    "one evaluated": Case(settings=DROPOUT, fault="evaluation", healthy=True),
    "one dropout": Case(
        settings=DROPOUT, fault="dropout_off_after_a_step", found=("rng.dropout_stopped",), where=(1, 0, None)
    ),
}


@pytest.fixture(scope="module")
def recorded(megatron, tmp_path_factory):
    """Return a function that gives the run of a case: those alike are recorded in one launch."""
    from preloaded import run_training

    folder = tmp_path_factory.mktemp("faults")

    def record(name: str) -> Path:
        out = folder / name.replace(" ", "_")
        if not out.exists():
            chosen = CASES[name]
            kind = chosen.processes, chosen.often
            together = {n: c for n, c in CASES.items() if (c.processes, c.often) == kind}
            asked = [
                {"name": n.replace(" ", "_"), "fault": c.fault, "settings": c.settings}
                for n, c in together.items()
            ]
            run_training(
                SCRIPT,
                [str(folder), json.dumps(asked)],
                processes=chosen.processes,
                megatron=megatron(VERSION),
                log=folder / f"{kind}.txt",
            )
        return out

    record.folder = folder
    return record


def _cases(often: bool) -> list[str]:
    return [name for name, case in CASES.items() if case.often is often]


def _is_shown(recorded, name: str) -> None:
    case, answer = CASES[name], check_run(recorded(name))
    found = {finding.id: finding for finding in answer.findings}
    if case.healthy or not case.fault:
        assert not found
        return
    assert set(case.found) <= set(found)
    if case.where is not None:
        key = found[case.found[0]].where
        assert (key.step, key.microbatch) == case.where[:2]
        assert case.where[2] is None or key.fqn == case.where[2]
    assert sum(outcome.exercised for outcome in answer.outcomes) > 1000


@pytest.mark.matrix
@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.parametrize("name", _cases(often=True))
def test_one_run_shows_it(recorded, name):
    _is_shown(recorded, name)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.parametrize("name", _cases(often=False))
def test_one_run_of_other_layouts_shows_it(recorded, name):
    _is_shown(recorded, name)


@pytest.mark.matrix
@pytest.mark.torch
@pytest.mark.megatron
def test_a_nan_is_told_while_training(recorded):
    recorded("one nan")
    lines = [
        line
        for line in (recorded.folder / "(1, True).txt").read_text().splitlines()
        if "mindspeed-precision: warning" in line
    ]
    told = (
        "mindspeed-precision: warning: step 1, rank 0: the first NaN or Inf: decoder.layers.1.mlp output in "
        "fprop, microbatch 0 [nonfinite.first]"
    )
    assert lines == [told]  # and nothing of the healthy runs of that launch
