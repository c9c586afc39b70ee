"""Two short runs in place of a full dump: what is kept, that it proves, and that it is the first runs again.

Real megatron-core, real runs; the first pair keeps fingerprints alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import INIT_STEP, Level, Phase, Role, Verdict
from mindspeed_precision.report.console import render
from mindspeed_precision.report.files import write_files

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.matrix]

FIRST = ("capture.level=fingerprint",)
LAYER = "decoder.layers.1.mlp.linear_fc1"
OTHER = "decoder.layers.0.self_attention.linear_proj"


class Pair:
    """Two runs of one model, the second with a plant: once to find where they part, once refined."""

    def __init__(self, directory: Path, plant, **settings) -> None:
        self.directory, self.plant, self.settings = directory, plant, settings
        self.steps = 2

    def train(self, name, *, planted, config=None, overrides=(), **changes):
        from mindspeed_precision.testing.recorded import record_training
        from mindspeed_precision.testing.trainer import TrainerSettings

        plant = self.plant(planted) if self.plant else None
        record_training(
            TrainerSettings(**{**self.settings, **changes}),
            self.directory / name,
            steps=self.steps,
            plant=plant,
            config=config,
            overrides=overrides,
        )
        return self.directory / name

    def first(self):
        runs = [
            self.train("a", planted=False, overrides=FIRST),
            self.train("b", planted=True, overrides=FIRST),
        ]
        diagnosis = compare_runs(*runs)
        return diagnosis, write_files(diagnosis, self.directory / "compare")

    def refined(self, files, **changes):
        config = Path(files["refine"])
        return (
            self.train("a-refined", planted=False, config=config),
            self.train("b-refined", planted=True, config=config, **changes),
        )


@pytest.fixture
def pair(cpu_megatron, tmp_path):
    return lambda plant=None, **settings: Pair(tmp_path, plant, **settings)


def ids(diagnosis):
    return [finding.id for finding in diagnosis.findings]


def kept(run):
    return [
        (rank, record) for rank in load_run(run).ranks.values() for record in rank.records if record.payload
    ]


@pytest.fixture
def other_linear(monkeypatch):
    """Let linears compute dW from a transposed copy of grad_output, or as Megatron does."""
    from megatron.core.tensor_parallel import layers

    from mindspeed_precision.testing.demo import other_backend

    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    own = linear.__dict__["backward"]

    def choose(planted):
        def plant(trainer):
            monkeypatch.setattr(linear, "backward", own if planted else staticmethod(other_backend.backward))

        return plant

    return choose


def test_the_layout_of_a_gemm_is_proved_by_two_short_runs(cpu_megatron, pair, other_linear):
    from mindspeed_precision.testing.demo import probe

    if not any(probe.differing_elements("bf16", onednn=True).values()):
        pytest.skip("this CPU multiplies a transposed view and its copy to the same bits in bf16")
    model = {"dtype": "bf16", "hidden": 64, "seq_length": 1280, "micro_batch_size": 1, "microbatches": 1}
    case = pair(other_linear, **model)
    diagnosis, files = case.first()
    assert "wgrad.operand_layout" in ids(diagnosis)
    assert not any(finding.proved_by_replay for finding in diagnosis.findings)
    assert not kept(case.directory / "a")

    runs = case.refined(files)
    refined = compare_runs(*runs)
    assert ids(refined) == ["wgrad.operand_layout"]
    assert refined.findings[0].proved_by_replay
    assert refined.first_divergence.key == diagnosis.first_divergence.key
    assert refined.steps == (0,)  # they stopped after the divergent step

    # what was said of them beforehand
    noted = json.loads(Path(files["verdict"]).read_text())["refine"]
    assert noted["config"] == files["refine"]
    payloads = [rank.payload(record).bits.nbytes for rank, record in kept(runs[0])]
    assert (len(payloads), sum(payloads)) == (noted["records"], diagnosis.refinement.payload_bytes)
    written = sum(path.stat().st_size for path in runs[0].rglob("rank*/*"))
    assert written / 1.5 < noted["bytes"] < written * 1.5
    # the small file replaces a large one: every tensor of those steps is many times more
    everything = sum(record.numel * 2 for record in load_run(runs[0]).ranks[0].records)
    assert sum(payloads) < everything / 3


def scaled_output(planted):
    """Scale what one linear returns; by 1 where nothing is planted."""

    def plant(trainer):
        module = dict(trainer.model[0].module.named_modules())[LAYER]
        factor = 1.001 if planted else 1.0
        module.register_forward_hook(lambda _, __, out: (out[0] * factor, *out[1:]))

    return plant


@pytest.fixture(scope="module")
def forward(cpu_megatron, tmp_path_factory):
    """Return a pair with a forward fault, its first diagnosis, its files, and its refined runs."""
    case = Pair(tmp_path_factory.mktemp("forward"), scaled_output)
    diagnosis, files = case.first()
    return case, diagnosis, files, case.refined(files)


def test_a_forward_fault_is_recaptured_with_its_inputs_and_weights(forward):
    _, diagnosis, _, runs = forward
    first = diagnosis.first_divergence
    assert (first.key.phase, first.key.role, first.key.fqn) == (Phase.FPROP, Role.OUTPUT, LAYER)
    assert "mismatched" not in first.comparison.metrics

    refined = compare_runs(*runs)
    assert refined.first_divergence.key == first.key
    assert refined.first_divergence.comparison.metrics["mismatched"] > 0
    assert refined.first_divergence.comparison.metrics["rel_frobenius"] == pytest.approx(1e-3, rel=1e-2)
    held = {(record.key.step, record.key.fqn, record.key.role) for _, record in kept(runs[0])}
    assert held == {
        (0, LAYER, Role.INPUT),
        (0, LAYER, Role.OUTPUT),
        (INIT_STEP, f"{LAYER}.weight", Role.PARAM),
        (INIT_STEP, f"{LAYER}.bias", Role.PARAM),
    }
    assert {record.key.microbatch for _, record in kept(runs[0])} == {0, -1}  # the second shows the same
    assert "determinism.not_repeated" not in ids(refined)
    assert refined.refinement is None  # nothing is left to recapture


def scaled_dw(planted):
    """Scale dW of two linears; by 1 where nothing is planted."""

    def plant(trainer):
        parameters = dict(trainer.model[0].module.named_parameters())
        for name in (LAYER, OTHER):
            parameters[f"{name}.weight"].register_hook(lambda grad: grad * (1.001 if planted else 1.0))

    return plant


@pytest.mark.long
def test_every_independent_origin_is_in_the_window(pair):
    case = pair(scaled_dw)
    diagnosis, files = case.first()
    assert {origin.key.fqn for origin in diagnosis.origins} == {f"{LAYER}.weight", f"{OTHER}.weight"}
    runs = case.refined(files)
    refined = compare_runs(*runs)
    assert [origin.key for origin in refined.origins] == [
        origin.key for origin in diagnosis.origins if origin.key.step == 0
    ]
    for origin in refined.origins:
        if origin.key.microbatch == 0:
            assert origin.comparison.metrics["rel_frobenius"] == pytest.approx(1e-3, rel=1e-2)
    assert ids(refined)[0] == "wgrad.scaled"


def test_a_divergence_after_the_first_step_keeps_that_step_and_the_parameters_it_began_with(pair):
    def late(planted):
        def plant(trainer):
            module = dict(trainer.model[0].module.named_modules())[LAYER]
            seen = []

            def scale(_, __, out):
                seen.append(1)
                wrong = planted and len(seen) > 2 * trainer.settings.microbatches
                return (out[0] * (1.001 if wrong else 1.0), *out[1:])

            module.register_forward_hook(scale)

        return plant

    case = pair(late)
    case.steps = 3
    diagnosis, files = case.first()
    assert diagnosis.first_divergence.key.step == 2
    runs = case.refined(files)
    refined = compare_runs(*runs)
    assert refined.first_divergence.key == diagnosis.first_divergence.key
    assert refined.steps == (0, 1, 2)
    held = {(record.key.step, record.key.phase, record.key.role) for _, record in kept(runs[1])}
    assert held == {
        (2, Phase.FPROP, Role.INPUT),
        (2, Phase.FPROP, Role.OUTPUT),
        (1, Phase.OPTIMIZER, Role.PARAM),
    }
    assert refined.status is Verdict.DIVERGED
    assert "determinism.not_repeated" not in ids(refined)


def test_healthy_runs_leave_nothing_to_refine(pair):
    diagnosis, files = pair(lambda _: scaled_output(planted=False)).first()
    assert diagnosis.status is Verdict.IDENTICAL
    assert diagnosis.refinement is None
    assert "refine" not in files
    assert json.loads(Path(files["verdict"]).read_text())["refine"] is None
    assert "next" not in render(diagnosis, files)


def test_a_refined_run_of_another_seed_is_named(forward):
    case, _, files, (baseline, _) = forward
    other = case.train("other-seed", planted=True, config=Path(files["refine"]), data_seed=99)
    refined = compare_runs(baseline, other)
    (finding,) = [finding for finding in refined.findings if finding.id == "determinism.not_repeated"]
    assert "the candidate does not repeat" in finding.title
    assert finding.where.phase is Phase.BATCH  # the first that differs
    assert finding.where.microbatch == 0
    assert "tokens" in finding.where.slot
    text = " ".join(finding.evidence)
    first = load_run(case.directory / "b").ranks[0].records
    expected = next(record for record in first if record.key == finding.where)
    assert f"{expected.digest.fingerprint:016x}" in text


@pytest.mark.long
def test_refined_runs_in_the_other_order_are_no_finding(forward):
    *_, (one, two) = forward
    assert "determinism.not_repeated" not in ids(compare_runs(two, one))
    # but one of them on both sides is
    assert "determinism.not_repeated" in ids(compare_runs(one, one))


def test_settings_of_the_first_runs_are_those_of_the_second(pair):
    from mindspeed_precision.config import load_settings

    case = pair(scaled_output)
    mine = (*FIRST, "steps=0-1", "capture.optimizer=false", "determinism.fill_uninitialized_memory=false")
    runs = [
        case.train("a", planted=False, overrides=mine),
        case.train("b", planted=True, overrides=[*mine, "capture.collectives=false"]),
    ]
    diagnosis = compare_runs(*runs)
    files = write_files(diagnosis, case.directory / "compare")
    settings = load_settings(files["refine"])
    assert (settings.steps.text, settings.stop_after) == ("0", 0)
    assert not settings.capture.optimizer
    assert not settings.determinism.enabled  # the trainer's, in both
    assert not settings.determinism.fill_uninitialized_memory
    assert settings.capture.level is Level.FINGERPRINT
    assert settings.capture.collectives  # not the same in both: each side says it by itself
    text = render(diagnosis, files, width=400)
    baseline, candidate = [line for line in text.splitlines() if "--precision-debug-out" in line]
    assert "--precision-debug-set capture.collectives=false" in candidate
    assert "--precision-debug-set" not in baseline
