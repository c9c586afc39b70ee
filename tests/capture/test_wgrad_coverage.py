"""dW of every trainable parameter in every microbatch, with its operands; or a finding that names it."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from mindspeed_precision.records import Phase, Role  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


CONFIGURATIONS = {
    "plain": {},
    "fusion": {"gradient_accumulation_fusion": True, "dtype": "bf16"},
    "fusion untied": {"gradient_accumulation_fusion": True, "untie": True},
    "tied": {"untie": False, "dtype": "bf16"},
    "untied": {"untie": True, "swiglu": True, "rmsnorm": True, "kv_groups": 2},
    "frozen": {"frozen": ("*layers.0*", "*word_embeddings*")},
    "recompute": {"recompute": True, "dropout": 0.1},
    "mixture": {"experts": 4},
    "mixture recompute": {"experts": 4, "recompute": True},
    "distributed optimizer": {"distributed_optimizer": True, "overlap": True, "dtype": "bf16"},
}
TOGETHER = {
    "tp2": {"tp": 2, "dropout": 0.1},
    "tp2 sequence parallel": {"tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "dp2 distributed optimizer bf16": {"distributed_optimizer": True, "dtype": "bf16"},
    "dp2 overlap": {"overlap": True},
    "tp2 sequence parallel fusion": {
        "tp": 2,
        "sequence_parallel": True,
        "gradient_accumulation_fusion": True,
    },
    "pp2": {"pp": 2, "microbatches": 4},
    "ep2": {"ep": 2, "experts": 4},
}
LONG = ("tp2", "dp2 overlap", "ep2")


@pytest.fixture
def record(cpu_megatron, tmp_path):
    """Record two steps and return the run."""

    def run(plant=None, **options):
        from mindspeed_precision import load_run
        from mindspeed_precision.testing.recorded import record_training
        from mindspeed_precision.testing.trainer import TrainerSettings

        record_training(TrainerSettings(**options), tmp_path / "run", plant=plant)
        return load_run(tmp_path / "run")

    return run


def assert_covered(rank):
    """Every trainable parameter has main_grad before and after, and dW, in every microbatch of every step."""
    trainable = {parameter.fqn for parameter in rank.parameters if parameter.trainable}
    assert trainable
    steps = [step for step in rank.steps if step >= 0]
    assert steps == [0, 1]
    for step in steps:
        for microbatch in range(rank.microbatches[step]):
            records = [r for r in rank.records if (r.key.step, r.key.microbatch) == (step, microbatch)]
            for slot in ("before", "after"):
                accumulated = {
                    r.key.fqn for r in records if r.key.role is Role.MAIN_GRAD and r.key.slot == slot
                }
                assert accumulated == trainable
            modules = {r.key.fqn for r in records if r.key.role is Role.WGRAD and r.key.phase is Phase.WGRAD}
            gradients = {
                r.key.fqn
                for r in records
                if r.key.phase is Phase.WGRAD and r.key.role in (Role.WGRAD, Role.BGRAD)
            }
            missing = {
                fqn for fqn in trainable - gradients if fqn.rpartition(".")[0] not in modules
            }  # fused: dW is known at the GEMM of its module only
            assert missing == set()


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_every_parameter_has_its_gradient(record, options):
    run = record(**options)
    assert run.manifest["findings"] == []
    assert_covered(run.ranks[0])
    keys = [r.key for r in run.ranks[0].records]
    assert len(keys) == len(set(keys))


def test_a_fused_gemm_counts_as_dw_when_runs_are_compared(record):
    from mindspeed_precision import compare_runs

    run = record(gradient_accumulation_fusion=True)
    diagnosis = compare_runs(run, run)
    assert diagnosis.findings == ()
    assert diagnosis.coverage.parameters == diagnosis.coverage.parameters_with_wgrad > 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.long if name in LONG else ())
        for name, options in TOGETHER.items()
    ],
)
def test_two_processes_are_covered_and_the_same_as_unobserved(megatron, capture_scripts, tmp_path, options):
    from preloaded import run_training

    from mindspeed_precision import load_run

    run_training(
        capture_scripts / "observe_twice.py",
        [str(tmp_path / "run"), json.dumps(options)],
        processes=2,
        megatron=megatron("0.17.1"),
        log=tmp_path / "log",
    )
    answers = [json.loads((tmp_path / f"answer{rank}.json").read_text()) for rank in (0, 1)]
    assert all(answer["count"] > 10 for answer in answers)
    assert [(answer["results"], answer["parameters"]) for answer in answers] == [(True, [])] * 2
    run = load_run(tmp_path / "run")
    assert run.manifest["findings"] == []
    assert sorted(run.ranks) == [0, 1]
    for rank in run.ranks.values():
        assert_covered(rank)


def test_the_operands_are_recorded_as_the_gemm_saw_them(record):
    run = record(dtype="bf16")
    at = {
        (r.key.fqn, r.key.role): r
        for r in run.ranks[0].records
        if r.key.phase is Phase.WGRAD and (r.key.step, r.key.microbatch) == (0, 0)
    }
    for linear in ("decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.self_attention.linear_proj"):
        grad_output, received = at[linear, Role.GRAD_OUTPUT], at[linear, Role.INPUT]
        wgrad = at[linear, Role.WGRAD]
        tokens, out = grad_output.shape
        assert (received.shape, wgrad.shape) == ((tokens, received.shape[1]), (out, received.shape[1]))
        assert (grad_output.layout.stride, grad_output.layout.contiguous) == ((out, 1), True)
        # what the GEMM gives is what arrives at the parameter
        assert at[f"{linear}.weight", Role.WGRAD].digest.fingerprint == wgrad.digest.fingerprint


def test_a_copied_operand_shows_in_its_strides(cpu_megatron, tmp_path):
    from mindspeed_precision import load_run
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    record_training(TrainerSettings(), tmp_path / "run", overrides=["remedies=[wgrad_contiguous_operands]"])
    run = load_run(tmp_path / "run")
    operands = [
        r for r in run.ranks[0].records if r.key.phase is Phase.WGRAD and r.key.role is Role.GRAD_OUTPUT
    ]
    assert operands
    assert all(r.layout.stride == (1, r.shape[0]) and not r.layout.contiguous for r in operands)


def test_fused_dw_of_the_first_microbatch_is_dw(cpu_megatron, tmp_path):
    """The difference of main_grad is exact where main_grad was zero: the fp32 product of the operands."""
    from mindspeed_precision import load_run
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    settings = TrainerSettings(gradient_accumulation_fusion=True)
    record_training(settings, tmp_path / "run", steps=1, overrides=["capture.level=tensor"])
    rank = load_run(tmp_path / "run").ranks[0]
    name = "decoder.layers.0.mlp.linear_fc1"
    of = {
        r.key.role: torch.from_numpy(rank.payload(r).bits.view("float32").copy())
        for r in rank.records
        if r.key.fqn == name and r.key.phase is Phase.WGRAD and r.key.microbatch == 0
    }
    fused = next(r for r in rank.records if r.key.fqn == name and r.key.role is Role.WGRAD)
    assert fused.note.startswith("difference of main_grad")
    product = torch.zeros_like(of[Role.WGRAD]).addmm_(of[Role.GRAD_OUTPUT].t(), of[Role.INPUT])
    assert torch.equal(of[Role.WGRAD], product)


def test_a_parameter_without_a_gradient_is_named(record):
    def plant(trainer):
        layer = trainer.model[0].module.decoder.layers[1]
        layer.unused = nn.Parameter(torch.zeros(3))

    run = record(plant=plant)
    findings = run.manifest["findings"]
    assert [f["id"] for f in findings] == ["coverage.parameter_without_wgrad"]
    assert "decoder.layers.1.unused" in findings[0]["title"]


def test_a_linear_whose_gemm_is_not_seen_is_named(record, monkeypatch):
    """A backward that multiplies in a way that nobody watches: dW arrives, its operands are missing."""

    def plant(trainer):
        from megatron.core.tensor_parallel import layers

        function = layers.LinearWithGradAccumulationAndAsyncCommunication

        def backward(ctx, grad_output):
            received, weight = ctx.saved_tensors
            flat, x = grad_output.reshape(-1, grad_output.shape[-1]), received.reshape(-1, received.shape[-1])
            bias = flat.sum(dim=0) if ctx.use_bias else None
            return grad_output.matmul(weight), torch.einsum("no,ni->oi", flat, x), bias, *[None] * 6

        monkeypatch.setattr(function, "backward", staticmethod(backward))

    run = record(plant=plant)
    findings = run.manifest["findings"]
    assert {f["id"] for f in findings} == {"coverage.wgrad_operands_unseen"}
    assert any("decoder.layers.0.mlp.linear_fc2" in f["title"] for f in findings)


def test_a_plain_torch_model_is_covered(tmp_path):
    from mindspeed_precision import Session, load_run
    from mindspeed_precision.testing.recorded import UNPINNED

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with Session(model=model, optimizer=optimizer, out=tmp_path / "run", overrides=UNPINNED) as session:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(torch.randn(3, 4)).square().mean()
                loss.backward()
            optimizer.step()
            session.step(loss=loss)
    run = load_run(tmp_path / "run")
    assert run.manifest["findings"] == []
    rank = run.ranks[0]
    assert (rank.microbatches[0], rank.steps) == (2, (-1, 0, 1))
    kinds = {(r.key.phase, r.key.role) for r in rank.records if r.key.fqn == "0.weight"}
    assert {
        (Phase.INIT, Role.PARAM),
        (Phase.WGRAD, Role.WGRAD),
        (Phase.ACCUMULATE, Role.MAIN_GRAD),
        (Phase.REDUCE, Role.REDUCED_GRAD),
        (Phase.OPTIMIZER, Role.HYPERPARAMETER),
        (Phase.OPTIMIZER, Role.EXP_AVG),
        (Phase.OPTIMIZER, Role.PARAM),
    } <= kinds
