"""Every rule of preflight speaks on its fault, is silent on the healthy twin, and is right about Megatron."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches import read_launch
from mindspeed_precision.launches.conditions import names_of
from mindspeed_precision.launches.known import known_arguments
from mindspeed_precision.preflight import PREFLIGHT, preflight
from mindspeed_precision.preflight.planned import Planned, installed_versions
from mindspeed_precision.preflight.rules import rules
from mindspeed_precision.records import Severity

ROOT = Path(__file__).parents[2]
PINNED = {
    "PYTHONHASHSEED": "1",
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
    "CUSTOM_MATMUL_SHUFFLE": "off",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
HEALTHY = (  # noqa: SIM905 - as one would type it
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --min-lr 1e-4 --hidden-dropout 0 "
    "--attention-dropout 0 --no-gradient-accumulation-fusion --transformer-impl local "
    "--tokenizer-type NullTokenizer --vocab-size 255 --mock-data --no-persist-layer-norm --no-rope-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --distributed-backend gloo"
).split()
MOE = "--num-experts 8 --moe-aux-loss-coeff 0.01 --disable-bias-linear"
FULL = "--recompute-granularity full"
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size"

# rule: (fault, its healthy twin, backend); each is added to HEALTHY on 8 processes
REFUSED = {
    "two_half_precisions": ("--fp16 --bf16", "--bf16"),
    "flash_attention_in_deterministic_mode": (
        "--deterministic-mode --use-flash-attn",
        "--deterministic-mode",
    ),
    "fused_loss_in_deterministic_mode": (
        "--deterministic-mode --cross-entropy-loss-fusion",
        "--cross-entropy-loss-fusion",
    ),
    "param_gather_without_distributed_optimizer": (
        "--overlap-param-gather --overlap-grad-reduce",
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
    ),
    "param_gather_without_grad_reduce": (
        "--overlap-param-gather --use-distributed-optimizer",
        "--use-distributed-optimizer",
    ),
    "expert_parallel_without_experts": (
        "--expert-model-parallel-size 2",
        f"--expert-model-parallel-size 2 {MOE}",
    ),
    "two_activations": ("--swiglu --squared-relu", "--swiglu"),
    "latent_and_grouped_attention": (
        "--multi-latent-attention --group-query-attention --num-query-groups 2",
        "--group-query-attention --num-query-groups 2",
    ),
    "full_recompute_without_method": (FULL, f"{FULL} --recompute-method uniform --recompute-num-layers 1"),
    "selective_recompute_with_method": (
        "--recompute-granularity selective --recompute-method uniform",
        "--recompute-granularity selective",
    ),
    "iterations_and_samples": ("--train-samples 40", ""),
    "warmup_twice": ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "--lr-warmup-iters 2"),
    "min_lr_above_lr": ("--min-lr 1", "--min-lr 1e-5"),
    "sequence_longer_than_positions": ("--seq-length 64", "--seq-length 16"),
    "save_without_interval": ("--save x", "--save x --save-interval 2"),
    "fp16_loss_without_fp16": ("--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy --fp16"),
    "fp32_residual_without_half_precision": (
        "--fp32-residual-connection",
        "--fp32-residual-connection --bf16",
    ),
    "tp_overlap_without_sp": ("--tp-comm-overlap", ""),
    "distribute_activations_without_tp": (
        f"--distribute-saved-activations {FULL} --recompute-method uniform --recompute-num-layers 1",
        f"{FULL} --recompute-method uniform --recompute-num-layers 1",
    ),
    "interleaved_without_pipeline": (f"{INTERLEAVED} 1", f"{INTERLEAVED} 2"),
    "interleaved_two_stages_without_overlap": (
        f"{INTERLEAVED} 2 --no-overlap-p2p-communication",
        f"{INTERLEAVED} 4 --no-overlap-p2p-communication",
    ),
    "world_and_model_parallel": ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 2"),
    "hidden_and_heads": ("--num-attention-heads 7", "--num-attention-heads 8"),
    "layers_and_pp": (
        "--num-layers 5 --pipeline-model-parallel-size 2",
        "--num-layers 6 --pipeline-model-parallel-size 2",
    ),
    "layers_and_virtual_stages": (
        "--num-layers 6 --num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2",
        "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2",
    ),
    "experts_and_ep": (
        f"{MOE} --num-experts 6 --expert-model-parallel-size 4",
        f"{MOE} --expert-model-parallel-size 4",
    ),
    "sequence_and_cp": (
        "--seq-length 20 --context-parallel-size 4",
        "--seq-length 24 --context-parallel-size 4",
    ),
    "heads_and_tp": (
        "--num-attention-heads 2 --tensor-model-parallel-size 4",
        "--num-attention-heads 8 --tensor-model-parallel-size 4",
    ),
}
"""What Megatron itself refuses at its start."""

OURS = {
    "experts_with_tp_without_sp": (
        f"{MOE} --tensor-model-parallel-size 2",
        f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel",
        "cpu",
    ),
    "more_experts_chosen_than_there_are": (f"{MOE} --moe-router-topk 9", f"{MOE} --moe-router-topk 8", "cpu"),
    "two_schedulers": (
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        "--override-opt_param-scheduler",
        "cpu",
    ),
    "average_in_collective_per_token": (
        "--ddp-average-in-collective --calculate-per-token-loss",
        "--ddp-average-in-collective",
        "cpu",
    ),
    "forward_backward_overlap_excludes": ("--moe-fb-overlap --swap-attention", "--moe-fb-overlap", "pta"),
    "alltoall_overlap_without_alltoall": (
        "--moe-alltoall-overlap-comm --moe-token-dispatcher-type allgather",
        "--moe-alltoall-overlap-comm --moe-token-dispatcher-type alltoall",
        "pta",
    ),
    "shared_experts_twice": (
        "--n-shared-experts 1 --moe-shared-expert-intermediate-size 64",
        "--n-shared-experts 1",
        "pta",
    ),
    "fused_rope_without_rope": (
        "--use-fused-rotary-pos-emb",
        "--use-fused-rotary-pos-emb --position-embedding-type rope",
        "pta",
    ),
    "framework_and_launcher": ("--ai-framework mindspore", "--ai-framework pytorch", None),
    "sequence_parallel_without_tp": (
        "--sequence-parallel",
        "--sequence-parallel --tensor-model-parallel-size 2",
        "cpu",
    ),
    "groups_without_grouped_attention": (
        "--num-query-groups 2",
        "--num-query-groups 2 --group-query-attention",
        "cpu",
    ),
    "loss_scale_without_fp16": ("--loss-scale 128", "--loss-scale 128 --fp16", "cpu"),
    "recompute_layers_without_full": ("--recompute-num-layers 1", "", "cpu"),
    "router_without_experts": ("--moe-router-topk 4", f"{MOE} --moe-router-topk 4", "cpu"),
    "balancing_without_loss": (f"{MOE} --moe-router-load-balancing-type none", MOE, "cpu"),
    "arguments_from_checkpoint": ("--load x --use-checkpoint-args", "--load x", "cpu"),
    "schedule_from_checkpoint": ("--load x --use-checkpoint-opt_param-scheduler", "--load x", "cpu"),
    "learning_rate_zero": ("--lr 0 --min-lr 0", "", "cpu"),
    "optimizer_not_loaded": ("--load x --no-load-optim", "--load x --no-load-optim --finetune", "cpu"),
    "random_state_not_saved": (
        "--save x --save-interval 2 --no-save-rng",
        "--save x --save-interval 2",
        "cpu",
    ),
    "hidden_dropout": ("--hidden-dropout 0.1", "", "cpu"),
    "cyclic_loader": ("--dataloader-type cyclic", "--dataloader-type single", "cpu"),
    "nothing_asks_pta": ("", "--npu-deterministic", "pta"),
    "balanced_experts": ("--balanced-moe-experts", "", "pta"),
    "grad_reduce": ("--overlap-grad-reduce", "", "cpu"),
    "moe_fb": ("--moe-fb-overlap", "", "pta"),
    "bf16_reduction": ("--grad-reduce-in-bf16", "", "cpu"),
    "mindspeed_fusions": ("--use-fused-rmsnorm", "", "pta"),
    "heads_and_groups": (
        "--group-query-attention --num-query-groups 3",
        "--group-query-attention --num-query-groups 2",
        "cpu",
    ),
    "sequence_and_sp": (
        "--sequence-parallel --tensor-model-parallel-size 4 --seq-length 30",
        "--sequence-parallel --tensor-model-parallel-size 4",
        "cpu",
    ),
    "global_batch": ("--global-batch-size 12", "--global-batch-size 16", "cpu"),
    "global_batch_from_ranks": ("", "", "cpu"),
}


def examined(words, *, backend="cpu", environment=PINNED, processes=8):
    command = ["torchrun", "--nproc-per-node", str(processes), "pretrain_gpt.py", *words]
    return preflight(command, backend=backend, environment=environment)


def spoke(words, backend="cpu"):
    """Return the rules that speak of a launch, whatever is installed: each is named in its evidence."""
    command = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *words]
    planned = Planned(
        launch=read_launch(command, PINNED), backend=backend or "mindspore", chosen="", versions={}
    )
    findings, _ = PREFLIGHT.ask_all(planned)
    lines = [line for finding in findings for line in finding.evidence]
    return {rule.name for rule in rules() for line in lines if f"({rule.name}; " in line}


def test_a_healthy_launch_has_nothing_against_it():
    answer = examined(HEALTHY)
    assert [finding.id for finding in answer.findings] == [
        "determinism.data_order"
    ]  # --mock-data: information
    assert answer.findings[0].severity is Severity.INFO
    assert sum(outcome.exercised for outcome in answer.outcomes) > 90
    assert not [
        outcome for outcome in answer.outcomes if outcome.name == "config.indivisible" and outcome.skipped
    ]


@pytest.mark.parametrize("rule", REFUSED)
def test_what_megatron_refuses_is_an_error(rule):
    fault, twin = REFUSED[rule]
    assert rule in spoke([*HEALTHY, *fault.split()])
    assert rule not in spoke([*HEALTHY, *twin.split()])
    (row,) = [one for one in rules() if one.name == rule]
    assert row.severity is Severity.ERROR


@pytest.mark.parametrize("rule", OURS)
def test_a_rule_speaks_on_its_fault_alone(rule):
    fault, twin, backend = OURS[rule]
    base = HEALTHY
    if rule == "global_batch_from_ranks":
        at = base.index("--global-batch-size")
        base = [*base[:at], *base[at + 2 :]]
    assert rule in spoke([*base, *fault.split()], backend)
    assert rule not in spoke([*HEALTHY, *twin.split()], backend)


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.torch
@pytest.mark.parametrize("version", ["0.17.1", "0.19.2"])
def test_megatron_agrees(version, megatron):
    """The real parser and validation refuse every fault that we call an error, and take its healthy twin."""
    known = {} if version == "0.17.1" else {"flash_attention_in_deterministic_mode"}
    names = [name for name in REFUSED if name not in known]
    cases = [([*HEALTHY, *REFUSED[name][turn].split()], 8) for name in names for turn in (0, 1)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "scripts" / "ask_megatron.py")],
        input=json.dumps(cases),
        env={**os.environ, **PINNED, "PYTHONPATH": os.pathsep.join([str(ROOT), str(megatron(version))])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [answer["error"] for answer in json.loads(done.stdout.splitlines()[-1])]
    told = dict(zip(names, zip(errors[::2], errors[1::2], strict=True), strict=True))
    assert {name for name, (fault, _) in told.items() if not fault} == set()
    assert {name: twin for name, (_, twin) in told.items() if twin} == {}


def test_every_rule_reads_what_there_is():
    known = known_arguments()
    derived = {
        "backend",
        "launcher",
        "world_size",
        "data_parallel_size",
        "model_parallel_size",
        "expert_tensor_size",
    }
    for rule in rules():
        unknown = {name for name in names_of(rule.when) if not name.isupper()} - known.settings - derived
        assert not unknown, rule.name
        assert rule.source, rule.name
    names = [rule.name for rule in rules()]
    assert len(names) == len(set(names))


def test_what_cannot_be_decided_is_said():
    answer = preflight(
        ["--tensor-model-parallel-size", "${TP}", "--num-layers", "4"], backend="cpu", environment={}
    )
    (sizes,) = [one for one in answer.outcomes if one.name == "config.indivisible"]
    assert "world_and_model_parallel (no number for world_size)" in sizes.skipped
    assert "config.unset_variable" in {finding.id for finding in answer.findings}


def ids(answer):
    return {finding.id: finding.severity for finding in answer.findings}


def test_variables_come_in_time_or_not():
    unset = {
        name: value for name, value in PINNED.items() if name not in ("PYTHONHASHSEED", "LCCL_DETERMINISTIC")
    }
    found = ids(examined(HEALTHY, backend="pta", environment=unset))
    assert found["determinism.too_late"] is Severity.WARNING
    assert found["determinism.environment"] is Severity.WARNING
    found = ids(examined([*HEALTHY, "--precision-debug"], backend="pta", environment=unset))
    assert found["determinism.too_late"] is Severity.ERROR  # the run would stop with this
    assert found["determinism.environment"] is Severity.INFO  # and sets this by itself
    assert (
        not {"determinism.too_late", "determinism.environment"} & ids(examined(HEALTHY, backend="pta")).keys()
    )


def test_what_is_set_without_effect(tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text("import os\nos.environ['PYTHONHASHSEED'] = '1'\n")
    launcher = tmp_path / "train.sh"
    launcher.write_text(
        f"HCCL_DETERMINISTIC=true\ntorchrun --nproc-per-node 8 {script} --bf16\nexport LCCL_DETERMINISTIC=1\n"
    )
    answer = preflight([str(launcher)], backend="pta", environment={})
    said = {f.title.split()[0]: f.evidence[0] for f in answer.findings if f.id == "env.not_in_effect"}
    assert said.keys() == {"HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", "PYTHONHASHSEED"}
    assert f"{script}:2" in said["PYTHONHASHSEED"]
    launcher.write_text(
        f"export HCCL_DETERMINISTIC=true LCCL_DETERMINISTIC=1 PYTHONHASHSEED=1\ntorchrun {script} --bf16\n"
    )
    script.write_text("import os\nprint(os.environ['PYTHONHASHSEED'])\n")
    answer = preflight([str(launcher)], backend="pta", environment={})
    assert "env.not_in_effect" not in ids(answer)


def test_connections_of_the_device():
    words = [*HEALTHY, "--tensor-model-parallel-size", "2"]
    without = {name: value for name, value in PINNED.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    for backend, severity in (("pta", Severity.ERROR), ("cuda", Severity.WARNING)):
        assert ids(examined(words, backend=backend, environment=without))["config.contradiction"] is severity
        assert "config.contradiction" not in ids(examined(words, backend=backend))


def test_without_a_launch_the_environment_is_examined():
    answer = preflight([], backend="pta", environment={})
    assert ids(answer).keys() <= {
        "determinism.too_late",
        "determinism.environment",
        "env.versions_incompatible",
    }
    assert "determinism.too_late" in ids(answer)


def test_words(capsys):
    answer = examined([*HEALTHY, "--num-layer", "4", "--lr", "2", "--bf16", "True", "--my-own-flag"])
    titles = [finding.title for finding in answer.findings]
    assert "--num-layer is not known: --num-layers is" in titles
    assert "--lr is given 2 times, with different values" in titles
    assert "words of the command belong to no argument" in titles
    assert any("neither Megatron's nor MindSpeed's" in title for title in titles)
    assert "--num_layers is not known: --num-layers is" in [
        f.title for f in examined(["--num_layers", "2"]).findings
    ]


@pytest.mark.parametrize(
    ("installed", "wrong"),
    [
        ({"torch": "2.7.1", "torch-npu": "2.7.1.post2"}, set()),
        ({"torch": "2.7.1+cpu", "torch-npu": "2.7.1"}, set()),
        ({"torch": "2.6.0", "torch-npu": "2.7.1"}, {"torch_and_torch_npu"}),
        ({"mindspeed": "0.12.1", "megatron-core": "0.12.1"}, set()),
        ({"mindspeed": "0.12.1", "megatron-core": "0.16.1"}, {"mindspeed_and_megatron"}),
        ({"mindspore": "2.7.1", "numpy": "2.1.0", "pandas": "2.2.2"}, {"mindspore_and_numpy"}),
        ({"mindspore": "2.7.1", "numpy": "1.26.4"}, set()),
        ({"pandas": "2.0.3", "numpy": "2.1.0"}, {"numpy_and_pandas"}),
    ],
)
def test_versions(installed, wrong, tmp_path, monkeypatch):
    """Real metadata of distributions, found as importlib finds it."""
    for name, version in installed.items():
        directory = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = examined(HEALTHY)
    lines = [line for f in answer.findings if f.id == "env.versions_incompatible" for line in f.evidence]
    for name in ("torch_and_torch_npu", "mindspeed_and_megatron", "mindspore_and_numpy", "numpy_and_pandas"):
        assert any(f"({name}; " in line for line in lines) == (name in wrong), lines


def test_what_a_package_asks_for(tmp_path, monkeypatch):
    directory = tmp_path / "mindspore-2.7.2.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mindspore\nVersion: 2.7.2\nRequires-Dist: safetensors<0.1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = [f for f in examined(HEALTHY).findings if "safetensors<0.1" in f.title]
    assert finding.id == "env.versions_incompatible"


@pytest.mark.megatron
def test_megatron_on_the_path_is_read_from_its_source(megatron):
    assert installed_versions({"PYTHONPATH": str(megatron("0.17.1"))})["megatron-core"] == "0.17.1"


@pytest.mark.parametrize(
    ("argv", "status", "line"),
    [
        (["preflight", "--backend", "cpu", "--", *HEALTHY], 0, ""),
        (["preflight", "--backend", "cpu", "--", *HEALTHY, "--fp16", "--bf16"], 1, ""),
        (["preflight", "--backend", "tpu"], 2, "--backend: no such backend"),
        (["preflight", "--", "no/such.sh"], 2, "no/such.sh: cannot be read"),
    ],
)
def test_command(argv, status, line, capsys, monkeypatch):
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert line in err
    assert bool(out) == (status != 2)


def test_json(capsys):
    main(["preflight", "--json", "--backend", "cpu", "--", *HEALTHY, "--fp16", "--bf16"])
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == "preflight"
    assert "config.contradiction" in [finding["id"] for finding in told["findings"]]


def test_no_such_backend():
    with pytest.raises(ConfigError, match="no such backend"):
        preflight([], backend="tpu")
