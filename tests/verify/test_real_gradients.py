"""Faults of real trainings in real megatron-core, one each, and healthy trainings: what `check` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_precision.records import Phase
from mindspeed_precision.verify.check import check_run

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

HERE = Path(__file__).parent
LAYER = "decoder.layers.1.mlp.linear_fc1"
FIRST_WEIGHT = "embedding.word_embeddings.weight"


@pytest.fixture
def checked(cpu_megatron, tmp_path):
    """Record three steps with a plant, and check the run."""

    def run(plant, *overrides, moving=False, **options):
        import planting

        from mindspeed_precision.testing.recorded import record_training
        from mindspeed_precision.testing.trainer import TrainerSettings

        def train():
            record_training(
                TrainerSettings(**options),
                tmp_path / "run",
                steps=3,
                plant=planting.FACTORIES[plant],
                overrides=overrides or ("capture.level=tensor", "capture.modules=false"),
            )

        if moving:
            with planting.decaying():
                train()
        else:
            train()
        return check_run(tmp_path / "run")

    return run


def own(examination):
    """The findings of gradients and of the optimizer; other checks are tested elsewhere."""
    families = ("wgrad.", "accumulate.", "reduce.", "clip.", "optimizer.", "schedule.")
    return [finding for finding in examination.findings if finding.id.startswith(families)]


FUSED = {"gradient_accumulation_fusion": True, "dtype": "bf16"}
FAULTS = {
    # plant: (options, id of the first finding, step, phase, fqn, what it says)
    "fc1_doubled": (
        {},
        "wgrad.changed_on_the_way",
        0,
        Phase.WGRAD,
        f"{LAYER}.weight",
        "2 times what the GEMM",
    ),
    "rounded_to_bf16": (
        {},
        "wgrad.changed_on_the_way",
        0,
        Phase.WGRAD,
        LAYER.replace("fc1", "fc2") + ".weight",
        "rounded",
    ),
    "fused_twice": (FUSED, "wgrad.not_the_product", 0, Phase.WGRAD, LAYER, "it is 2 times the product"),
    "buffer_not_zeroed": (
        {},
        "accumulate.not_zero_at_start",
        1,
        Phase.ACCUMULATE,
        "decoder.final_layernorm.weight",
        "norm",
    ),
    "doubled_after_each_backward": (
        {},
        "accumulate.changed_between",
        0,
        Phase.ACCUMULATE,
        LAYER.replace("fc1", "fc2") + ".bias",
        "2 times",
    ),
    "mlp_detached": (
        {},
        "wgrad.missing",
        0,
        Phase.WGRAD,
        LAYER.replace("fc1", "fc2") + ".bias",
        "no dW",
    ),
    "clipped_by_half": ({}, "clip.wrong_factor", 0, Phase.CLIP, FIRST_WEIGHT, "multiplied by"),
    "step_begins_at_1": (
        {},
        "optimizer.step_counter",
        0,
        Phase.OPTIMIZER,
        FIRST_WEIGHT,
        "was 2, not 1",
    ),
    "norms_decayed": (
        {},
        "optimizer.decay_of_norm_or_bias",
        0,
        Phase.OPTIMIZER,
        "decoder.layers.0.input_layernorm.weight",
        "0.1",
    ),
    "beta2_of_the_class": (
        {},
        "optimizer.not_as_configured",
        0,
        Phase.OPTIMIZER,
        FIRST_WEIGHT,
        "beta2 is 0.95, not 0.999",
    ),
    "eps_of_the_class": (
        {},
        "optimizer.not_as_configured",
        0,
        Phase.OPTIMIZER,
        FIRST_WEIGHT,
        "eps is 1e-05, not 1e-08",
    ),
    "state_lost": ({}, "optimizer.step_counter", 2, Phase.OPTIMIZER, FIRST_WEIGHT, "set back to 0"),
    "schedule_twice": ({}, "schedule.stepped_wrongly", 1, Phase.OPTIMIZER, "schedule", "more than once"),
    "rate_set_by_hand": (
        {"moving": True},
        "schedule.lr",
        1,
        Phase.OPTIMIZER,
        FIRST_WEIGHT,
        "0.00045, the schedule gives 0.0005",
    ),
    "count_off": (
        {"moving": True},
        "schedule.stepped_wrongly",
        0,
        Phase.OPTIMIZER,
        "schedule",
        "does not go with",
    ),
}
LONG = {
    "eps_of_the_class",
    "beta2_of_the_class",
    "norms_decayed",
    "clipped_by_half",
    "schedule_twice",
    "mlp_detached",
    "count_off",
}


@pytest.mark.parametrize(
    "plant", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in FAULTS]
)
def test_a_fault_is_named_where_it_is(checked, plant):
    options, id_, step, phase, fqn, text = FAULTS[plant]
    finding = own(checked(plant, **options))[0]
    assert finding.where is not None
    assert (finding.id, finding.where.step, finding.where.phase, finding.where.fqn) == (id_, step, phase, fqn)
    assert text in " ".join((finding.title, *finding.evidence))


HEALTHY = {
    "twin": ("twin_of_linears", {}),
    "a schedule that moves": ("nothing", {"moving": True, "dtype": "bf16"}),
    "fp16": ("nothing", {"dtype": "fp16"}),
    "fused": ("nothing", FUSED),
    "experts, frozen": ("nothing", {"experts": 4, "dtype": "bf16", "frozen": ("*final_layernorm*",)}),
    "recompute, untied, not clipped": (
        "nothing",
        {"untie": True, "swiglu": True, "rmsnorm": True, "recompute": True, "clip": 0.0},
    ),
    "overlap": ("nothing", {"dtype": "bf16", "distributed_optimizer": True, "overlap": True}),
    "dropout": ("nothing", {"dropout": 0.1, "microbatches": 1}),
}
SHORT = {"a schedule that moves", "fused"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in HEALTHY]
)
def test_a_healthy_training_gives_nothing(checked, name):
    plant, options = HEALTHY[name]
    examination = checked(plant, **options)
    assert own(examination) == []
    exercised = {outcome.name: outcome.exercised for outcome in examination.outcomes}
    for law in (
        "wgrad.not_the_product",
        "accumulate.not_the_sum",
        "reduce.not_the_sum",
        "optimizer.update_not_recomputed",
    ):
        assert exercised[law] > 0, law


LIVE = (
    "capture.level=fingerprint",
    "capture.modules=false",
    "capture.verify_products=true",
    "capture.verify_sums=true",
)


@pytest.mark.parametrize("options", [{}, FUSED], ids=["plain", "fused"])
def test_laws_are_checked_while_training_without_elements(checked, options):
    examination = checked("fused_twice" if options else "nothing", *LIVE, **options)
    outcomes = {outcome.name: outcome for outcome in examination.outcomes}
    assert outcomes["wgrad.not_the_product"].exercised == 54
    assert outcomes["accumulate.not_the_sum"].skipped == ""
    found = [finding.id for finding in own(examination)]
    assert found == (["wgrad.not_the_product"] if options else [])
    assert bool(options) is ("checked while training" in str(own(examination)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_checking_while_training_changes_no_bit(cpu_megatron, tmp_path, dtype):
    import torch

    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings

    settings, kept = TrainerSettings(dtype=dtype, dropout=0.1), []
    with CpuTrainer(settings) as trainer:
        plain = trainer.train(2)
        before = {name: value.detach().clone() for name, value in trainer.named_parameters().items()}
    observed = record_training(settings, tmp_path / "run", plant=kept.append, overrides=LIVE)
    assert observed == plain
    assert all(torch.equal(before[name], value) for name, value in kept[0].named_parameters().items())


RANKS = {
    # name: (plant, options, id, what it says)
    "mean": ("not_averaged", {}, "reduce.not_the_sum", "the sum, not the mean"),
    "mean of shards": (
        "not_averaged",
        {"distributed_optimizer": True},
        "reduce.not_the_sum",
        "the sum, not the mean",
    ),
    "not waited for": (
        "not_waited_for",
        {},
        "reduce.not_the_sum",
        "it was not reduced: it is this rank's own",
    ),
    "copies": (
        "copies_in_the_norm",
        {"tp": 2},
        "clip.norm_not_of_gradients",
        "rank has whole were counted 2 times",
    ),
    "one rank": (
        "norm_of_one_rank",
        {"tp": 2},
        "clip.norm_not_of_gradients",
        "that of this rank's gradients alone",
    ),
    "tied": (
        "embedding_not_reduced",
        {"pp": 2},
        "reduce.not_the_sum",
        "it lacks the stage that shares the embedding",
    ),
    "norms": (
        "norms_not_reduced",
        {"tp": 2, "sequence_parallel": True},
        "reduce.not_the_sum",
        "it lacks the other ranks of the tensor-parallel group",
    ),
    "healthy dp": ("nothing", {"dtype": "bf16"}, None, ""),
    "healthy shards": (
        "nothing",
        {"distributed_optimizer": True, "overlap": True, "dtype": "bf16"},
        None,
        "",
    ),
    "healthy tp sp": ("nothing", {"tp": 2, "sequence_parallel": True, "dtype": "bf16"}, None, ""),
    "healthy pp": ("nothing", {"pp": 2}, None, ""),
    "healthy cp": ("nothing", {"cp": 2}, None, ""),
    "healthy ep": ("nothing", {"ep": 2, "experts": 4}, None, ""),
}
SHORT_RANKS = {"copies", "healthy shards"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT_RANKS else pytest.mark.long) for name in RANKS]
)
def test_two_ranks(megatron, tmp_path, name):
    from preloaded import run_training

    plant, options, id_, text = RANKS[name]
    script = HERE / "scripts" / "record_planted.py"
    arguments = [str(tmp_path / "run"), json.dumps(options), plant]
    run_training(script, arguments, processes=2, megatron=megatron("0.17.1"), log=tmp_path / "log")
    found = own(check_run(tmp_path / "run"))
    assert [finding.id for finding in found[:1]] == [id_] * (id_ is not None)
    assert text in " ".join(finding.title for finding in found)
