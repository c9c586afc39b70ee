"""Requested against effective in one run: fake runs, and what Megatron itself makes of its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_precision.records import Severity
from mindspeed_precision.testing.fake_runs import EMBEDDING, FakeRun, constant, plant, write_fake_run
from mindspeed_precision.verify.check import check_run
from mindspeed_precision.verify.forwarded import lost_arguments

BIASES = frozenset(f"decoder.layers.{layer}.mlp.linear_fc1.bias" for layer in range(2))
BIAS = "decoder.layers.0.mlp.linear_fc1.bias"
HEALTHY = FakeRun(
    undecayed=BIASES, megatron_args={"adam_beta1": 0.9, "adam_beta2": 0.95, "optimizer": "adam"}
)
UNREAD = [plant(phase=p, drop=True) for p in ("fprop", "dgrad", "wgrad", "accumulate", "reduce", "clip")]
IDS = ("config.not_in_effect", "optimizer.parameter_in_no_group", "optimizer.parameter_twice")


def check(directory, run=HEALTHY, **changes):
    plants = [*changes.pop("plants", ()), *UNREAD]
    answer = check_run(write_fake_run(directory, run, plants=plants, **changes))
    return {finding.id: finding for finding in answer.findings if finding.id in IDS}, answer


def outcome(answer, name):
    return next(one for one in answer.outcomes if one.name == name)


def test_what_is_applied_as_asked(tmp_path):
    found, answer = check(tmp_path / "run")
    assert found == {}
    assert outcome(answer, "config.not_in_effect").exercised == 2 * 6
    assert outcome(answer, "optimizer.parameter_in_no_group").exercised == 6


def test_weight_decay_that_was_never_handed_on(tmp_path):
    found, _ = check(tmp_path / "run", megatron_args={"weight_decay": 0.01})
    finding = found["config.not_in_effect"]
    assert finding.severity is Severity.ERROR
    assert finding.title == "the optimizer applies weight_decay 0.1 where 0.01 was asked for"
    assert (finding.where.step, finding.where.slot) == (0, "weight_decay")


def test_weight_decay_that_grows_is_the_schedules(tmp_path):
    growing = {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}
    assert check(tmp_path / "run", megatron_args=growing)[0] == {}


def test_weight_decay_against_its_multiplier(tmp_path):
    decayed = plant(
        phase="optimizer", role="hyperparameter", slot="weight_decay", fqn=BIAS, value=constant(0.1)
    )
    found, _ = check(tmp_path / "run", plants=[decayed])
    assert "the optimizer applies weight_decay 0.1" in found["config.not_in_effect"].title


def test_an_optimizer_with_numbers_of_its_own_is_left_alone(tmp_path):
    lion = {"optimizer": "lion", "adam_beta2": 0.95}
    _, answer = check(tmp_path / "run", beta2=0.5, megatron_args=lion)
    assert "optimizer.not_as_configured" not in {finding.id for finding in answer.findings}


def test_a_parameter_in_no_group(tmp_path):
    found, _ = check(tmp_path / "run", ungrouped=frozenset({BIAS}))
    assert found["optimizer.parameter_in_no_group"].evidence == (BIAS,)


def test_a_frozen_parameter_needs_no_group(tmp_path):
    assert check(tmp_path / "run", frozen=frozenset({BIAS}))[0] == {}


def test_a_parameter_in_a_group_twice(tmp_path):
    found, _ = check(tmp_path / "run", twice=frozenset({f"{EMBEDDING}.weight"}))
    assert found["optimizer.parameter_twice"].evidence == (f"{EMBEDDING}.weight",)


def test_without_groups_it_says_so(tmp_path):
    run = write_fake_run(tmp_path / "run", HEALTHY)
    (run / "rank00000" / "effective.json").unlink()
    assert "did not record" in outcome(check_run(run), "optimizer.parameter_in_no_group").skipped


def configured(**sections):
    config = {"megatron_args": {}, "transformer_config": {}, "ddp_config": {}, "optimizer_config": {}}
    return {"config": {**config, **sections}}


@pytest.mark.parametrize(
    ("arguments", "section", "values", "severity"),
    [
        ({"overlap_grad_reduce": True}, "ddp_config", {"overlap_grad_reduce": False}, Severity.WARNING),
        (
            {"accumulate_allreduce_grads_in_fp32": True},
            "ddp_config",
            {"grad_reduce_in_fp32": False},
            Severity.ERROR,
        ),
        ({"adam_beta2": 0.95}, "optimizer_config", {"adam_beta2": 0.999}, Severity.ERROR),
        ({"swiglu": True}, "transformer_config", {"gated_linear_unit": False}, Severity.ERROR),
        ({"norm_epsilon": 1e-6}, "transformer_config", {"layernorm_epsilon": 1e-5}, Severity.ERROR),
    ],
)
def test_a_flag_that_never_reached_its_object(tmp_path, arguments, section, values, severity):
    manifest = configured(megatron_args=arguments, **{section: values})
    found, _ = check(tmp_path / "run", manifest=manifest)
    finding = found["config.not_in_effect"]
    assert finding.severity is severity
    assert finding.title.endswith(f"never reached the {section}")
    ((argument, value),) = arguments.items()
    reached = dict.fromkeys(values, value)
    again, _ = check(tmp_path / "healthy", manifest=configured(megatron_args=arguments, **{section: reached}))
    assert argument not in str(again)


def test_a_field_that_another_switch_turns_on(tmp_path):
    manifest = configured(
        megatron_args={"swiglu": False, "quick_geglu": True}, transformer_config={"gated_linear_unit": True}
    )
    assert check(tmp_path / "run", manifest=manifest)[0] == {}


def test_a_model_that_is_not_made_of_the_arguments():
    config = {
        "megatron_args": {"hidden_size": 64, "kv_channels": 16},
        "transformer_config": {"hidden_size": 32, "kv_channels": 8},
    }
    looked, lost, skipped = lost_arguments(config)
    assert (looked, lost) == (0, [])
    assert "another hidden_size" in skipped


def with_module(run, name, values, fqn):
    path = run / "rank00000" / "effective.json"
    plain = json.loads(path.read_text())
    plain["modules"] = [{"fqn": fqn, "class": name, "values": values}]
    path.write_text(json.dumps(plain))


@pytest.mark.parametrize(
    ("fqn", "kind", "values", "found"),
    [
        ("decoder.layers.*.norm", "m.RMSNorm", {"eps": 1e-5}, True),
        ("decoder.layers.*.norm", "m.RMSNorm", {"eps": 1e-6}, False),
        ("decoder.layers.*.indexer.k_norm", "m.LayerNorm", {"eps": 1e-5}, False),
        ("vision.norm", "m.RMSNorm", {"eps": 1e-5}, False),
        ("decoder.layers.*.self_attention.core_attention.attention_dropout", "n.Dropout", {"p": 0.0}, True),
        ("decoder.layers.*.self_attention.core_attention.attention_dropout", "n.Dropout", {"p": 0.1}, False),
    ],
)
def test_what_modules_hold(tmp_path, fqn, kind, values, found):
    model = {"layernorm_epsilon": 1e-6, "attention_dropout": 0.1, "hidden_dropout": 0.1}
    manifest = configured(transformer_config=model)
    run = write_fake_run(tmp_path / "run", HEALTHY, manifest=manifest, plants=UNREAD, steps=1)
    with_module(run, kind, values, fqn)
    ids = [finding.id for finding in check_run(run).findings]
    assert ("config.not_in_effect" in ids) == found


FLAGS = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "4",
    "--train-iters",
    "5",
    "--lr",
    "1e-3",
    "--min-lr",
    "1e-5",
    "--bf16",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "256",
    "--mock-data",
    "--transformer-impl",
    "local",
    "--swiglu",
    "--normalization",
    "RMSNorm",
    "--norm-epsilon",
    "1e-6",
    "--adam-beta2",
    "0.95",
    "--weight-decay",
    "0.1",
    "--init-method-std",
    "0.01",
    "--disable-bias-linear",
    "--group-query-attention",
    "--num-query-groups",
    "2",
    "--attention-dropout",
    "0",
    "--accumulate-allreduce-grads-in-fp32",
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
]
SCRIPT = Path(__file__).parent / "scripts" / "real_configuration.py"


def real_configuration(directory, *flags):
    """Return what Megatron's own code makes of a command line, as a run records it."""
    environment = {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(SCRIPT), *FLAGS, *flags]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.parametrize(
    "version",
    [
        pytest.param("0.17.1", marks=pytest.mark.matrix),
        *(pytest.param(version, marks=pytest.mark.long) for version in ("0.18.2", "0.19.2")),
    ],
)
def test_megatrons_own_forwarding_loses_nothing(megatron, version):
    config = real_configuration(megatron(version))
    looked, lost, skipped = lost_arguments(config)
    assert looked > 70
    assert [one.line for one in lost] == []
    assert skipped == ""
    config["optimizer_config"]["adam_beta2"] = 0.999
    assert [one.copy.argument for one in lost_arguments(config)[1]] == ["adam_beta2"]
