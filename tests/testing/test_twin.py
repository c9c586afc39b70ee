"""The native twin on MindSpore: it trains, repeats, and shows the defects that the probes measure."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import ConfigError

pytest.importorskip("mindspore")
pytestmark = pytest.mark.mindspore

SMALL = {"hidden": 32, "seq_length": 16, "microbatches": 3, "steps": 3}


def trainer(**variant):
    from mindspeed_precision.testing.twin.settings import TwinSettings
    from mindspeed_precision.testing.twin.trainer import TwinTrainer

    return TwinTrainer(TwinSettings(**{**SMALL, **variant}))


@cache
def trained(**variant):
    """Return the steps of a twin, and its parameters after them."""
    twin = trainer(**variant)
    return twin.train(twin.settings.steps), twin.host_parameters()


def same_bits(one, other):
    steps, parameters = one
    other_steps, other_parameters = other
    return steps == other_steps and all(
        parameters[name].tobytes() == other_parameters[name].tobytes() for name in parameters
    )


@cache
def measured(name):
    from mindspeed_precision.testing.twin.defects import PROBES

    return PROBES[name]()


def test_it_learns_and_repeats_bit_for_bit():
    first = trained()
    trained.cache_clear()
    assert same_bits(first, trained())
    losses = [step.loss for step in first[0]]
    assert abs(losses[0] - np.log(256)) < 0.3
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
@pytest.mark.parametrize("untie", [False, True])
def test_the_tape_and_value_and_grad_give_the_same_bits(positions, untie):
    variant = {"positions": positions, "untie": untie}
    assert same_bits(trained(gradients="tape", **variant), trained(gradients="value_and_grad", **variant))


def test_the_module_tree_and_the_parameters_carry_megatron_s_names():
    twin = trainer(untie=True, positions="learned_absolute", layers=1)
    cells = {name for name, _ in twin.model.cells_and_names()}
    layer = "decoder.layers.0."
    assert {
        "embedding.word_embeddings",
        layer + "self_attention.linear_qkv",
        layer + "self_attention.core_attention.scale_mask_softmax",
        layer + "mlp.linear_fc2",
        "output_layer",
    } <= cells
    assert set(twin.named_parameters()) == {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        *(
            layer + name + kind
            for name in ("input_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2")
            for kind in (".weight", ".bias")
        ),
        *(
            layer + f"self_attention.linear_{name}.{kind}"
            for name in ("qkv", "proj")
            for kind in ("weight", "bias")
        ),
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
        "output_layer.weight",
    }


def test_core_attention_receives_q_k_and_v():
    twin = trainer(layers=1)
    shapes = []
    twin.model.decoder.layers[0].self_attention.core_attention.register_forward_pre_hook(
        lambda cell, inputs: shapes.append([tuple(tensor.shape) for tensor in inputs[:3]])
    )
    twin.train_one_step()
    assert shapes == [[(16, 2, 4, 8)] * 3] * 3


def test_where_the_bias_is_added_changes_outputs_and_not_the_loss():
    outputs = {}
    for inside in (False, True):
        twin = trainer(bias_inside=inside, layers=1, microbatches=1)
        fc1 = twin.model.decoder.layers[0].mlp.linear_fc1
        bias = fc1.bias.asnumpy().copy()
        fc1.register_forward_hook(
            lambda cell, inputs, output, inside=inside: outputs.update({inside: output[0].asnumpy().copy()})
        )
        outputs[inside, "loss"] = twin.train_one_step().loss
    assert outputs[False, "loss"] == outputs[True, "loss"]
    assert np.abs(bias).max() > 0
    assert np.array_equal(outputs[False] + bias, outputs[True])


def test_split_differs_from_chunk_exactly_when_the_probe_says_so():
    probe = measured("split")
    chunk, split = trained(split="chunk"), trained(split="split")
    assert same_bits(chunk, split) is not probe.present
    assert chunk[0][0].loss == split[0][0].loss  # the forward pass is right in any case
    if probe.present:
        assert probe.follows_law
        assert abs(chunk[0][0].grad_norm - split[0][0].grad_norm) > 1e-2


def test_a_transposed_wgrad_differs_exactly_when_the_probe_says_so():
    probe = measured("accumulation")
    plain, transposed = trained(wgrad="contiguous"), trained(wgrad="transposed")
    assert plain[0][0].loss == transposed[0][0].loss
    if not probe.present:
        assert same_bits(plain, transposed)
        return
    assert probe.follows_law
    assert abs(plain[0][1].loss - transposed[0][1].loss) > 1e-2


@pytest.mark.parametrize("healthy", [{"microbatches": 1}, {"gradients": "value_and_grad"}])
def test_a_transposed_wgrad_is_harmless_where_nothing_accumulates_on_the_tape(healthy):
    assert same_bits(trained(**healthy), trained(wgrad="transposed", **healthy))


def test_the_misread_sum_is_a_permutation_of_the_right_one():
    if not measured("accumulation").present:
        pytest.skip("this MindSpore does not have the defect")
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    sums = {}
    for layout in ("contiguous", "transposed"):
        twin = trainer(wgrad=layout, clip=0.0, weight_decay=0.0)
        index = [parameter.name for parameter in twin.optimizer.parameters].index(name)
        update = twin.optimizer.construct

        def keep(gradients, layout=layout, index=index, update=update):
            sums[layout] = gradients[index].asnumpy().copy()
            return update(gradients)

        twin.optimizer.construct = keep
        twin.train_one_step()
    right, wrong = sums["contiguous"], sums["transposed"]
    assert np.abs(right - wrong).max() > 0.1 * np.abs(right).max()
    assert np.array_equal(np.ascontiguousarray(right.T).reshape(right.shape), wrong)


def test_our_adamw_and_mindspore_s_experimental_one_agree():
    ours, theirs = trained(), trained(optimizer="experimental.adamw")
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-5)
    start = trainer().host_parameters()
    assert all(not np.array_equal(start[name], ours[1][name]) for name in start)


def test_a_parameter_moves_by_torch_s_formula():
    twin = trainer(layers=1, microbatches=1, clip=0.0, min_lr=None)
    before = twin.host_parameters()
    twin.train_one_step()
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    # after one step the moments cancel: m/√v = sign(g), up to eps
    step = before[name] * (1 - 1e-3 * 0.1) - twin.host_parameters()[name]
    assert np.quantile(np.abs(np.abs(step) - 1e-3), 0.9) < 1e-5


def test_mint_sgd_does_nothing_exactly_when_the_probe_says_so():
    start = trainer().host_parameters()
    steps, end = trained(optimizer="mint.sgd")
    unmoved = all(start[name].tobytes() == end[name].tobytes() for name in start)
    assert unmoved is measured("mint_optimizer").present
    assert all(step.grad_norm > 0 for step in steps)


def test_in_place_addition_is_measured():
    probe = measured("in_place")
    assert probe.present is not np.array_equal(probe.found, [2, 3, 4])
    assert probe.follows_law is probe.present


def test_settings_that_no_twin_has_are_refused():
    with pytest.raises(ConfigError, match=r"split: unknown choice .*chunk or split"):
        trainer(split="slice")
    with pytest.raises(ConfigError, match="layers: must be positive"):
        trainer(layers=0)
    with pytest.raises(ConfigError, match="heads do not divide"):
        trainer(heads=3)


def test_the_module_trains_from_a_file_and_prints_what_the_demo_reads(tmp_path):
    from mindspeed_precision.testing.demo.launch import parse_log

    def run(*words):
        command = [sys.executable, "-m", "mindspeed_precision.testing.twin", "--hidden", "32", "--steps", "2"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
        return parse_log(done.stdout)

    path = tmp_path / "weights.safetensors"
    first = run("--seed", "7", "--save-weights", str(path))
    assert [row.iteration for row in first] == [1, 2]
    assert float(first[1].loss) < float(first[0].loss)
    assert first == run("--seed", "8", "--weights", str(path)) != run("--seed", "8")


@pytest.mark.parametrize("gradients", ["tape", "value_and_grad"])
def test_a_session_records_the_twin_s_gemms_and_changes_no_bit(tmp_path, gradients):
    words = ["--hidden", "32", "--steps", "1", "--microbatches", "2", "--gradients", gradients]
    command = [sys.executable, "-m", "mindspeed_precision.testing.twin", *words]
    quiet = {**os.environ, "PYTHONHASHSEED": "1234"}
    plain = subprocess.run(command, capture_output=True, text=True, check=True, env=quiet)
    out = tmp_path / "run"
    debugged = subprocess.run(
        [*command, "--precision-debug-out", str(out)], capture_output=True, text=True, check=True, env=quiet
    )
    assert debugged.stdout == plain.stdout
    records = load_run(out).ranks[0].records
    seen = {(record.key.fqn, record.key.role.value) for record in records if record.key.phase == "wgrad"}
    for role in ("grad_output", "input", "wgrad"):
        assert ("decoder.layers.1.self_attention.linear_qkv", role) in seen
    assert ("decoder.layers.1.self_attention.linear_qkv.weight", "wgrad") in seen
    batches = {(record.key.microbatch, record.key.slot) for record in records if record.key.phase == "batch"}
    assert {(number, key) for number in (0, 1) for key in ("tokens", "labels", "loss_mask")} <= batches
