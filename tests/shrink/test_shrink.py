"""A big launch becomes a small one of the same structure, which Megatron takes and which trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches import read_launch
from mindspeed_precision.shrink import shrink
from mindspeed_precision.shrink.parallel import Parallel
from mindspeed_precision.shrink.shrinking import parameters, shrunk_launch

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "mindspeed_precision" / "testing" / "demo"
PLAIN = (
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion --num-workers 0 --eval-iters 0 --eval-interval 1000 "
    "--log-interval 1 --split 100,0,0 --tokenizer-type NullTokenizer --lr 1.25e-6 --min-lr 1.25e-7 "
    "--lr-decay-style cosine --train-iters 2000"
)
GLM4 = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers "
    "40 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 2 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
    "--global-batch-size 64 --vocab-size 151329 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--add-qkv-bias --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--rotary-percent 0.5 --bf16 --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer "
    "--load checkpoint"
)
MIXTURE = (
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --sequence-parallel --num-layers 48 "
    "--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 64 --vocab-size 151936 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --qk-layernorm --bf16 --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 "
    "--moe-aux-loss-coeff 0.001 --moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type "
    "alltoall --attention-dropout 0 --hidden-dropout 0 --recompute-granularity full --recompute-method "
    "uniform --recompute-num-layers 4"
)


def launch_of(text, processes=8, launcher="torchrun"):
    command = f"{launcher} --nproc-per-node {processes} pretrain_gpt.py {PLAIN} {text}"
    return read_launch(command.split(), {})


def shrunk(text, processes=8, **options):
    options = {"devices": 8, **options}
    launch, changes, sizes = shrunk_launch(launch_of(text, processes), **options)
    return launch.arguments, changes, sizes


def test_glm4_keeps_its_structure_and_says_what_is_lost():
    arguments, changes, sizes = shrunk(GLM4)
    assert sizes == Parallel(tp=2, pp=2, cp=1, ep=1, etp=2, dp=2)
    old = launch_of(GLM4).arguments
    for setting in (
        *(
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "sequence_parallel",
            "num_query_groups",
        ),
        *(
            "num_attention_heads",
            "swiglu",
            "normalization",
            "use_distributed_optimizer",
            "rotary_percent",
            "bf16",
        ),
        *("untie_embeddings_and_output_weights", "add_qkv_bias", "lr", "lr_decay_style", "vocab_size"),
    ):
        assert arguments.value(setting) == old.value(setting), setting
    assert arguments.integer("num_layers") == 2
    assert arguments.integer("hidden_size") == 32 * 16
    assert arguments.integer("ffn_hidden_size") / 512 == pytest.approx(13696 / 4096, rel=0.02)
    assert not arguments.has("load")
    assert (arguments.value("train_iters"), arguments.value("lr_decay_iters")) == (10, 2000)
    said = " ".join(changes.lost)
    for word in ("40 layers", "4096 channels", "8192 tokens", "32 microbatches", "of the checkpoint"):
        assert word in said


def test_experts_keep_their_choice():
    arguments, changes, sizes = shrunk(MIXTURE, processes=64, devices=16)
    assert (sizes.world, sizes.tp, sizes.ep, sizes.dp) == (16, 2, 8, 8)  # experts are split over TP, too
    assert arguments.integer("moe_router_topk") == 8
    assert arguments.integer("num_experts") % 8 == 0
    assert arguments.integer("num_experts") > 8
    assert arguments.integer("recompute_num_layers") <= arguments.integer("num_layers")
    assert "128 experts" in " ".join(changes.lost)


@pytest.mark.parametrize("structure", [*product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 4), (0, 2, 8))])
def test_every_structure_fits_itself(structure):
    """Sizes divide each other, whatever is combined: the rules that Megatron agrees with are asked."""
    tp, pp, chunks, cp, ep, groups = structure
    per_stage = 48 // (pp * chunks)
    text = (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--context-parallel-size {cp} "
        "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 256 "
        "--vocab-size 32000 --swiglu"
    )
    text += f" --num-layers-per-virtual-pipeline-stage {per_stage}" if chunks > 1 and pp > 1 else ""
    text += f" --group-query-attention --num-query-groups {groups}" if groups else ""
    text += " --sequence-parallel" if tp > 1 else ""
    if ep > 1:
        text += f" --expert-model-parallel-size {ep} --num-experts 64 --moe-aux-loss-coeff 1e-3"
    answer = shrink(launch_of(text, processes=64).words(), devices=32, environment={})
    assert answer.findings == ()
    assert answer.outcomes[0].exercised > 30
    assert "not decided" not in answer.outcomes[0].skipped
    (command,) = answer.tables["command"]
    again = read_launch(command.split(), {})
    old = launch_of(text).arguments
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        assert again.arguments.integer(name) == old.integer(name)
    assert again.arguments.integer("expert_model_parallel_size") == ep
    if chunks > 1 and pp > 1:
        assert again.arguments.integer("num_layers") == pp * chunks
    if groups:
        ratio = again.arguments.integer("num_attention_heads") / again.arguments.integer("num_query_groups")
        assert ratio == 16 / groups
    assert parameters(again.arguments) < parameters(old) / 4
    assert again.world_size <= 32


def test_what_does_not_fit_is_said_and_halved_only_if_asked():
    text = GLM4.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 8")
    with pytest.raises(ConfigError, match="does not fit one node") as caught:
        shrunk(text, processes=16)
    assert "--halve" in caught.value.remedy
    arguments, changes, sizes = shrunk(text, processes=16, halve=True)
    assert sizes.world <= 8
    assert arguments.integer("tensor_model_parallel_size") == 4
    assert any("TP 8" in line for line in changes.lost)


def test_uneven_pipelines_and_patterns():
    text = GLM4 + " --decoder-first-pipeline-num-layers 19 --num-layers 39"
    arguments, changes, _ = shrunk(text)
    assert not arguments.has("decoder_first_pipeline_num_layers")
    assert any("stages of different lengths" in line for line in changes.lost)
    text = MIXTURE + " --moe-layer-freq ([0]*3+[1]*45)"
    arguments, _, _ = shrunk(text, processes=64, devices=16)
    assert arguments.value("moe_layer_freq") == "([0]*1+[1]*1)"


def test_launchers_are_rewritten():
    words = "msrun --worker_num 16 --local_worker_num=8 --join=True t.py".split()  # noqa: SIM905
    launch, _, _ = shrunk_launch(read_launch([*words, *PLAIN.split(), *GLM4.split()], {}), devices=8)
    assert launch.words()[:6] == ["msrun", "--worker_num", "8", "--local_worker_num=8", "--join=True", "t.py"]


def test_command(capsys, monkeypatch):
    words = ["torchrun", "--nproc-per-node", "8", "t.py", *PLAIN.split(), *GLM4.split()]
    assert main(["shrink", "--devices", "4", "--vocabulary", "256", "--", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SHRUNK to 4 processes (from 8)")
    assert "--vocab-size 256" in out
    assert main(["shrink", "--json", "--", *words]) == 0
    assert "--num-layers 2" in json.loads(capsys.readouterr().out)["tables"]["command"][0]
    for argv, line in (
        (["shrink"], "no launch was given"),
        (["shrink", "--devices", "2", "--", *words], "does not fit one node"),
        (["shrink", "--", "t.py", "--bf16"], "no number of layers"),
        (
            ["shrink", "--", "t.py", "--num-layers", "2"],
            "--num-attention-heads: no size of a model (found it",
        ),
        (
            ["shrink", "--", "t.py", "--num-layers=2", "--num-attention-heads=2", f"--hidden-size={10**20}"],
            f"--hidden-size: no size of a model (found {10**20}, expected a whole number from 1 to",
        ),
        (["shrink", "--devices", "0", "--", *words], "--devices: no number of anything"),
        (["shrink", "--vocabulary", "-1", "--", *words], "--vocabulary: no number of anything"),
    ):
        assert main(argv) == 2
        assert line in capsys.readouterr().err


CASES = {
    "glm4": (GLM4, 8, 4),
    "mixture": (MIXTURE.replace("--expert-model-parallel-size 8", "--expert-model-parallel-size 2"), 64, 4),
    "interleaved": (GLM4 + " --num-layers-per-virtual-pipeline-stage 10", 8, 4),
    "context": (
        GLM4.replace("--pipeline-model-parallel-size 2", "--context-parallel-size 2"),
        *(8, 4),
    ),
}


@pytest.mark.matrix
@pytest.mark.torch
@pytest.mark.megatron
def test_megatron_takes_what_was_shrunk(megatron):
    """The real parser and validation, for each structure; and they refuse one that is spoiled."""
    asked = []
    for text, processes, devices in CASES.values():
        arguments, _, sizes = shrunk(text, processes, devices=devices, vocabulary=255)
        asked.append((arguments.words(), sizes.world))
    spoiled = [*asked[0][0], "--num-layers", "3"]
    asked.append((spoiled, asked[0][1]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "preflight" / "scripts" / "ask_megatron.py")],
        input=json.dumps(asked),
        env={
            **os.environ,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(megatron("0.17.1"))]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *errors, refused = [answer["error"] for answer in json.loads(done.stdout.splitlines()[-1])]
    assert dict(zip(CASES, errors, strict=True)) == dict.fromkeys(CASES, "")
    assert refused


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.parametrize("case", CASES)
def test_what_was_shrunk_trains(case, megatron, tmp_path):
    """The real pretrain, on as many CPU processes as the shrunk launch has."""
    from preloaded import run_training

    from mindspeed_precision.testing.demo.launch import SCRIPT

    text, processes, devices = CASES[case]
    arguments, _, sizes = shrunk(text, processes, devices=devices, vocabulary=255)
    done = run_training(
        SCRIPT,
        [*arguments.words(), "--exit-interval", "2"],
        processes=sizes.world,
        megatron=megatron("0.17.1"),
        log=tmp_path / "log.txt",
    )
    assert [row.iteration for row in done.rows] == [1, 2]
    assert all(float(row.loss) > 0 and float(row.grad_norm) > 0 for row in done.rows)
