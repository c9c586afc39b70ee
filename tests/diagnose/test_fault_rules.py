"""Every rule with a fault that it must name, and healthy twins about which all must be silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_precision.align import align
from mindspeed_precision.compare import load_policy
from mindspeed_precision.diagnose import find_causes, gather_facts
from mindspeed_precision.diagnose.rules import finding_ids
from mindspeed_precision.diagnose.rules.undetermined import unknown
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import INIT_STEP, Diagnosis, Level, Severity, Verdict
from mindspeed_precision.testing.fake_runs import (
    EMBEDDING,
    HEAD,
    LINEAR,
    constant,
    nudged,
    permuted,
    plant,
    scaled,
    transposed_layout,
    write_fake_run,
)

WEIGHT = f"{LINEAR}.weight"
GEMM = {"phase": "wgrad", "role": "wgrad", "fqn": LINEAR}


_BASELINES: dict[str, Path] = {}


@pytest.fixture(autouse=True, scope="module")
def _shared_baselines(tmp_path_factory):
    """Keep one baseline per shape: most tests differ in the candidate alone."""
    _BASELINES.clear()
    _BASELINES["directory"] = tmp_path_factory.mktemp("baselines")


def diagnose(directory, baseline=None, **candidate) -> Diagnosis:
    baseline = baseline or {}
    shape = "" if "plants" in baseline else repr(sorted(baseline.items()))
    one = _BASELINES.get(shape)
    if one is None:
        one = write_fake_run(
            _BASELINES["directory"] / str(len(list(_BASELINES["directory"].iterdir()))), **baseline
        )
        if shape:
            _BASELINES[shape] = one
    two = write_fake_run(directory / "candidate", **{**baseline, **candidate})
    return compare_runs(one, two)


TWO_RANKS = {"ranks": 2}
ELEMENTS = {"level": Level.TENSOR}
LAYOUT = plant(phase="wgrad", role="grad_output", fqn=LINEAR, layout=transposed_layout)
NUDGE = plant(**GEMM, step=0, microbatch=1, value=nudged(3))

# name: (shape of both runs, fault in the candidate, finding, step, phase, fqn, origins)
FAULTS = {
    "layout": ({}, {"plants": [LAYOUT, NUDGE]}, "wgrad.operand_layout", 0, "wgrad", LINEAR, 1),
    "kernel": (ELEMENTS, {"plants": [NUDGE]}, "wgrad.value", 0, "wgrad", LINEAR, 1),
    "after the GEMM": (
        {},
        {"plants": [plant(phase="wgrad", role="wgrad", fqn=WEIGHT, step=0, microbatch=1, value=permuted())]},
        "wgrad.after_gemm",
        0,
        "wgrad",
        WEIGHT,
        1,
    ),
    "kernel, fingerprints": (
        {"level": Level.FINGERPRINT},
        {"plants": [NUDGE]},
        "wgrad.value",
        0,
        "wgrad",
        LINEAR,
        1,
    ),
    "scaled, elements": (
        ELEMENTS,
        {"plants": [plant(**GEMM, microbatch=0, step=0, value=scaled(1.001))]},
        "wgrad.scaled",
        0,
        "wgrad",
        LINEAR,
        1,
    ),
    "scaled, statistics": (
        {},
        {"plants": [plant(**GEMM, microbatch=0, step=0, value=scaled(1.001))]},
        "wgrad.scaled",
        0,
        "wgrad",
        LINEAR,
        1,
    ),
    "operand": (
        {},
        {"plants": [plant(phase="wgrad", role="input", fqn=LINEAR, step=0, microbatch=0, value=scaled(2))]},
        "wgrad.operand_value",
        0,
        "wgrad",
        LINEAR,
        1,
    ),
    "accumulation": (
        {},
        {
            "plants": [
                plant(phase="accumulate", slot="after", fqn=WEIGHT, step=0, microbatch=1, value=nudged())
            ]
        },
        "wgrad.accumulation",
        0,
        "accumulate",
        WEIGHT,
        1,
    ),
    "stale gradient": (
        {},
        {
            "plants": [
                plant(phase="accumulate", slot="before", fqn=WEIGHT, step=1, microbatch=0, value=constant(1))
            ]
        },
        "wgrad.stale_main_grad",
        1,
        "accumulate",
        WEIGHT,
        1,
    ),
    "loss gradient scaled": (
        {},
        {"plants": [plant(phase="dgrad", role="grad_output", fqn="", step=0, value=scaled(2))]},
        "loss.gradient_scaled",
        0,
        "dgrad",
        "",
        2,
    ),
    "backward scaled": (
        ELEMENTS,
        {
            "plants": [
                plant(phase="dgrad", role="grad_input", fqn=LINEAR, step=0, microbatch=1, value=scaled(1.5))
            ]
        },
        "dgrad.scaled",
        0,
        "dgrad",
        LINEAR,
        1,
    ),
    "gradient between modules": (
        {},
        {
            "plants": [
                plant(phase="dgrad", role="grad_output", fqn=LINEAR, step=0, microbatch=0, value=nudged())
            ]
        },
        "dgrad.value",
        0,
        "dgrad",
        LINEAR,
        1,
    ),
    "input between modules": (
        {},
        {"plants": [plant(phase="fprop", role="input", fqn=HEAD, step=0, microbatch=0, value=nudged())]},
        "fprop.value",
        0,
        "fprop",
        HEAD,
        1,
    ),
    "recomputed otherwise": (
        {"recompute": True},
        {"plants": [plant(phase="fprop", fqn=LINEAR, step=0, microbatch=0, recomputed=True, value=nudged())]},
        "fprop.recomputed_differs",
        0,
        "fprop",
        LINEAR,
        1,
    ),
    "reduction": (
        TWO_RANKS,
        {"plants": [plant(phase="reduce", fqn=WEIGHT, step=0, value=nudged())]},
        "reduce.value",
        0,
        "reduce",
        WEIGHT,
        1,
    ),
    "reduction scaled": (
        TWO_RANKS,
        {"plants": [plant(phase="reduce", fqn=WEIGHT, step=0, value=scaled(2))]},
        "reduce.scaled",
        0,
        "reduce",
        WEIGHT,
        1,
    ),
    "grad norm": (
        {},
        {"plants": [plant(phase="clip", role="grad_norm", step=0, value=scaled(2))]},
        "optimizer.grad_norm",
        0,
        "clip",
        "grad_norm",
        1,
    ),
    "clipping": (
        {},
        {"plants": [plant(phase="clip", role="main_grad", fqn=WEIGHT, step=0, value=scaled(2))]},
        "optimizer.clip",
        0,
        "clip",
        WEIGHT,
        1,
    ),
    "state": (
        {},
        {"plants": [plant(phase="optimizer", role="exp_avg", fqn=WEIGHT, step=1, value=constant(0))]},
        "optimizer.state",
        1,
        "optimizer",
        WEIGHT,
        1,
    ),
    "update": (
        {},
        {"plants": [plant(phase="optimizer", role="param", fqn=WEIGHT, step=0, value=nudged())]},
        "optimizer.update",
        0,
        "optimizer",
        WEIGHT,
        1,
    ),
    "weight decay": (
        {},
        {"plants": [plant(role="hyperparameter", slot="weight_decay", fqn=WEIGHT, value=constant(0))]},
        "optimizer.weight_decay",
        0,
        "optimizer",
        WEIGHT,
        1,
    ),
    "learning rate": ({}, {"lr": 0.02}, "optimizer.lr", 0, "optimizer", f"{EMBEDDING}.weight", 6),
    "epsilon": ({}, {"eps": 1e-5}, "optimizer.eps", 0, "optimizer", f"{EMBEDDING}.weight", 6),
    "beta": (
        {},
        {"plants": [plant(role="hyperparameter", slot="beta2", value=constant(0.9))]},
        "optimizer.beta",
        0,
        "optimizer",
        f"{EMBEDDING}.weight",
        6,
    ),
    "step counter": (
        {},
        {"plants": [plant(role="hyperparameter", slot="step", fqn=WEIGHT, value=constant(7))]},
        "optimizer.hyperparameter",
        0,
        "optimizer",
        WEIGHT,
        1,
    ),
    "frozen": ({}, {"frozen": frozenset([WEIGHT])}, "model.frozen_parameter", 0, "wgrad", LINEAR, 1),
    "frozen baseline": (
        {"frozen": frozenset([WEIGHT])},
        {"frozen": frozenset()},
        "model.frozen_parameter",
        0,
        "wgrad",
        LINEAR,
        1,
    ),
    "other data": (
        {},
        {"plants": [plant(role="batch", slot="tokens", step=1, microbatch=0, value=constant(3))]},
        "data.batch_differs",
        1,
        "batch",
        "batch",
        1,
    ),
    "shuffled rank": (
        TWO_RANKS,
        {"plants": [plant(role="batch", slot="tokens", rank=1, value=permuted())]},
        "data.batch_order",
        0,
        "batch",
        "batch",
        1,
    ),
    "initial weights": (
        {},
        {"plants": [plant(phase="init", fqn=WEIGHT, value=scaled(1.5))]},
        "weights.initial_differs",
        INIT_STEP,
        "init",
        WEIGHT,
        1,
    ),
    "forward": (
        {},
        {"plants": [plant(phase="fprop", role="output", fqn=LINEAR, step=0, microbatch=0, value=scaled(2))]},
        "fprop.value",
        0,
        "fprop",
        LINEAR,
        1,
    ),
    "backward": (
        {},
        {
            "plants": [
                plant(phase="dgrad", role="grad_input", fqn=LINEAR, step=0, microbatch=1, value=scaled(2))
            ]
        },
        "dgrad.scaled",
        0,
        "dgrad",
        LINEAR,
        1,
    ),
    "backward, one element": (
        {},
        {
            "plants": [
                plant(phase="dgrad", role="grad_input", fqn=LINEAR, step=0, microbatch=1, value=nudged())
            ]
        },
        "dgrad.value",
        0,
        "dgrad",
        LINEAR,
        1,
    ),
    "loss": (
        {},
        {"plants": [plant(phase="loss", microbatch=0, step=1, value=scaled(2))]},
        "fprop.loss",
        1,
        "loss",
        "loss",
        1,
    ),
    "not finite": (
        {},
        {
            "plants": [
                plant(
                    phase="fprop",
                    role="output",
                    fqn=LINEAR,
                    step=1,
                    microbatch=1,
                    value=constant(float("nan")),
                )
            ]
        },
        "nonfinite.first",
        1,
        "fprop",
        LINEAR,
        1,
    ),
    "dtype": (
        {},
        {"plants": [plant(phase="reduce", fqn=WEIGHT, step=0, value=lambda v: v.astype("float16"))]},
        "layout.kind_differs",
        0,
        "reduce",
        WEIGHT,
        1,
    ),
    "random state": (
        {},
        {"plants": [plant(role="rng", value=constant(7))]},
        "rng.state_differs",
        0,
        "batch",
        "rng",
        1,
    ),
    "input": (
        {},
        {
            "plants": [
                plant(phase="fprop", role="input", fqn="output_layer", step=0, microbatch=0, value=scaled(2))
            ]
        },
        "fprop.value",
        0,
        "fprop",
        "output_layer",
        1,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_and_is_the_only_origin(name, tmp_path):
    shape, fault, finding, step, phase, fqn, origins = FAULTS[name]
    diagnosis = diagnose(tmp_path, shape, **fault)
    first = diagnosis.first_divergence
    assert diagnosis.status is Verdict.DIVERGED
    assert (first.key.step, first.key.phase.value, first.key.fqn) == (step, phase, fqn)
    assert len(diagnosis.origins) == origins, [origin.key.describe() for origin in diagnosis.origins]
    named = [f for f in diagnosis.findings if f.id == finding]
    assert len(named) == 1, [f.id for f in diagnosis.findings]
    assert first.key in named[0].explains
    best = next(f for f in diagnosis.findings if first.key in f.explains)
    assert best.id == finding


def test_a_module_that_no_gradient_reaches(tmp_path):
    """The outer module gets another gradient, the inner one none: the second is the cause."""
    unreached = plant(phase="dgrad", fqn=LINEAR, drop=True)
    beside = plant(phase="dgrad", role="grad_input", fqn="decoder.layers.1", step=0, value=permuted())
    diagnosis = diagnose(tmp_path, plants=[unreached, beside])
    finding = diagnosis.findings[0]
    assert finding.id == "dgrad.missing"
    assert (finding.where.step, finding.where.fqn) == (0, LINEAR)
    assert "candidate" in finding.title
    assert diagnosis.first_divergence.key in finding.explains


def test_a_gradient_that_was_not_recorded_anywhere_is_not_missing(tmp_path):
    diagnosis = diagnose(tmp_path, plants=[plant(phase="dgrad", drop=True)])
    assert "dgrad.missing" not in {finding.id for finding in diagnosis.findings}


@pytest.mark.parametrize(
    "shape", [{}, ELEMENTS, TWO_RANKS, {"level": Level.FINGERPRINT}, {"microbatches": 1}]
)
def test_healthy_pair_is_identical_without_a_finding(shape, tmp_path):
    diagnosis = diagnose(tmp_path, shape)
    assert diagnosis.status is Verdict.IDENTICAL
    assert diagnosis.findings == ()
    assert diagnosis.origins == ()
    assert diagnosis.coverage.parameters == diagnosis.coverage.parameters_with_wgrad == 6


def test_several_faults_are_several_origins(tmp_path):
    decay = plant(role="hyperparameter", slot="weight_decay", fqn=f"{EMBEDDING}.weight", value=constant(0.5))
    diagnosis = diagnose(tmp_path, plants=[decay, NUDGE])
    assert [origin.key.fqn for origin in diagnosis.origins] == [LINEAR, f"{EMBEDDING}.weight"]
    assert {f.id for f in diagnosis.findings} == {"wgrad.value", "optimizer.weight_decay"}
    assert diagnosis.diverged > 50


def test_amplification_of_one_dw_stays_one_origin_over_many_steps(tmp_path):
    fault = plant(**GEMM, step=0, microbatch=0, value=permuted())
    diagnosis = diagnose(tmp_path, {"steps": 6, "ranks": 2}, plants=[fault])
    assert len(diagnosis.origins) == 1
    assert diagnosis.origins[0].ranks == (0, 1)
    assert diagnosis.origins[0].propagated == diagnosis.diverged - 2
    assert diagnosis.diverged > 1000


def test_unrecorded_state_between_compared_steps_makes_no_origin(tmp_path):
    # parameters are recorded before the first step only: step 1 starts from something unseen
    unseen = [plant(phase="optimizer", drop=True)]
    fault = plant(**GEMM, step=0, microbatch=0, value=permuted())
    diagnosis = diagnose(tmp_path, {"plants": unseen}, plants=[*unseen, fault])
    assert [origin.key.describe() for origin in diagnosis.origins] == [
        f"step 0, microbatch 0: {LINEAR} wgrad in wgrad"
    ]


def test_missing_records_are_never_agreement(tmp_path):
    diagnosis = diagnose(tmp_path, plants=[plant(phase="fprop", role="output", fqn=LINEAR, drop=True)])
    assert diagnosis.status is Verdict.MISSING
    assert [f.id for f in diagnosis.findings] == ["coverage.unmatched_records"]
    assert len(diagnosis.unmatched) == 4


def test_parameter_without_dw_is_a_gap_and_not_called_frozen(tmp_path):
    unseen = [plant(phase="wgrad", fqn=f"{LINEAR}*", drop=True)]
    diagnosis = diagnose(tmp_path, {"plants": unseen})
    assert [f.id for f in diagnosis.findings] == ["coverage.parameter_without_wgrad"]
    assert diagnosis.coverage.parameters_with_wgrad == 4
    one_sided = diagnose(tmp_path / "one", plants=unseen)
    assert "model.frozen_parameter" not in {f.id for f in one_sided.findings}
    assert one_sided.status is Verdict.MISSING


@pytest.mark.parametrize(
    ("shape", "finding"),
    [
        ({"lr": 0.0}, "vacuous.lr_zero"),
        (
            {"plants": [plant(phase=p, drop=True) for p in ("wgrad", "accumulate", "reduce", "clip")]},
            "vacuous.no_gradient",
        ),
        (
            {
                "plants": [
                    plant(phase="dgrad", role="grad_*", value=scaled(0)),
                    plant(phase="wgrad", value=scaled(0)),
                ]
            },
            "vacuous.no_gradient",
        ),
        ({"plants": [plant(step=s, drop=True) for s in (0, 1)]}, "vacuous.no_records"),
        (
            {"plants": [plant(role=r, drop=True) for r in ("hyperparameter", "exp_avg*", "master_param")]},
            "vacuous.no_update",
        ),
    ],
)
def test_what_was_not_exercised_is_not_certified(shape, finding, tmp_path):
    diagnosis = diagnose(tmp_path, shape)
    assert diagnosis.status is Verdict.MISSING
    assert finding in {f.id for f in diagnosis.findings}


def test_random_state_is_information_beside_a_known_cause(tmp_path):
    diagnosis = diagnose(tmp_path, lr=0.02, plants=[plant(role="rng", value=constant(7))])
    by_id = {f.id: f for f in diagnosis.findings}
    assert by_id["rng.state_differs"].severity is Severity.INFO
    assert diagnosis.first_divergence.key.slot == "lr"


@pytest.mark.parametrize(
    ("changes", "finding", "line"),
    [
        ({"megatron_args": {"clip_grad": 2.0}}, "config.differs", "clip_grad: not set in the baseline, 2.0"),
        ({"manifest": {"numerics": {"num_threads": 2}}}, "env.differs", "num_threads: 1 in the baseline, 2"),
        ({"manifest": {"versions": {"numpy": "0"}}}, "env.versions_differ", "numpy"),
    ],
)
def test_what_the_manifests_say_is_listed(changes, finding, line, tmp_path):
    diagnosis = diagnose(tmp_path, **changes)
    assert diagnosis.status is Verdict.IDENTICAL
    (found,) = diagnosis.findings
    assert found.id == finding
    assert any(line in evidence for evidence in found.evidence)


def test_another_number_of_microbatches_is_the_cause(tmp_path):
    diagnosis = diagnose(tmp_path, {"microbatches": 2}, microbatches=3)
    by_id = {f.id: f for f in diagnosis.findings}
    assert diagnosis.findings[0].id == "config.microbatches_differ"
    assert "2 microbatches in the baseline and 3" in by_id["config.microbatches_differ"].title
    assert "diagnosis.unknown" not in by_id
    assert diagnosis.status is Verdict.DIVERGED


def test_a_rule_that_fits_no_record_is_named(tmp_path):
    settings = {
        "capture": {"rules": [rule(fqn="decoder.layrs.*"), rule(fqn="*"), rule(level="drop", fqn="x")]}
    }
    (found,) = diagnose(tmp_path, {"manifest": {"settings": settings}}).findings
    assert found.id == "coverage.rule_without_match"
    assert {"fqn=decoder.layrs.*" in line for line in found.evidence} == {True}
    assert len(found.evidence) == 2  # the candidate has the same settings here


def rule(**changes):
    return {"fqn": "*", "role": "*", "phase": "*", "steps": "", "level": "tensor", **changes}


def test_arguments_that_decide_no_number_are_not_listed(tmp_path):
    assert diagnose(tmp_path, megatron_args={"save": "elsewhere", "log_interval": 7}).findings == ()


def test_findings_of_the_runs_themselves_are_given_once(tmp_path):
    own = {"id": "coverage.patch_never_called", "severity": "error", "confidence": 0.5, "title": "t",
           "evidence": ["e"], "remedy": "r"}  # fmt: skip
    diagnosis = diagnose(tmp_path, {"manifest": {"findings": [own]}})
    (found,) = diagnosis.findings
    assert (found.id, found.severity) == ("coverage.patch_never_called", Severity.ERROR)
    assert found.evidence == ("reported by both runs while running", "e")


def test_an_origin_that_no_rule_explains_is_unknown_with_its_window(tmp_path):
    runs = [
        load_run(write_fake_run(tmp_path / "baseline")),
        load_run(
            write_fake_run(tmp_path / "candidate", plants=[plant(role="wgrad", fqn=LINEAR, value=scaled(2))])
        ),
    ]
    aligned = align(*runs, [])
    facts = gather_facts(aligned.baseline, aligned.candidate, aligned, policy=load_policy("exact"))
    (finding,) = unknown(facts, [])
    assert finding.id == "diagnosis.unknown"
    assert finding.where == facts.origins[0].key
    assert len(finding.explains) == len(facts.origins)
    assert not list(unknown(facts, find_causes(facts)))


def test_every_registered_id_is_exercised_by_a_test():
    exercised = {fault[2] for fault in FAULTS.values()}
    elsewhere = {
        "coverage.unmatched_records",
        "coverage.parameter_without_wgrad",
        "coverage.not_judged",
        "coverage.ranks_not_linked",
        "coverage.ranks_missing",
        "vacuous.lr_zero",
        "vacuous.no_gradient",
        "vacuous.no_records",
        "vacuous.no_update",
        "coverage.rule_without_match",
        "config.microbatches_differ",
        "config.perturbed",
        "config.vocabulary_padding",
        "determinism.not_repeated",
        "config.differs",
        "env.differs",
        "env.versions_differ",
        "layout.noncontiguous_accumulate",
        "layout.noncontiguous_grad",
        "optimizer.parameters_unmoved",
        "parallel.replicas_differ",
        "reduce.own_fault",
        "wgrad.own_fault",
        "diagnosis.unknown",
        "dgrad.missing",
        "wgrad.seen_in_main_grad",
        "loss.gradient_scaled",
        "fprop.recomputed_differs",
        "weights.buffer_differs",
        "model.buffer_differs",
    }
    assert finding_ids() == exercised | elsewhere
