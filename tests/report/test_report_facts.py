"""What a report is made of: curves, depth, operands, groups, configuration; and what is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_precision.records import Role, Severity, Side, StepScalars, Verdict
from mindspeed_precision.report import curves
from mindspeed_precision.report.facts import report_facts
from mindspeed_precision.report.growth import growth_of
from mindspeed_precision.testing.fake_runs import LINEAR


def test_curves_have_the_steps_that_only_one_run_has(make_report):
    rows = make_report("longer").facts.curves.rows
    assert [row.step for row in rows] == [0, 1, 2, 3, 4, 5]
    assert all(None not in (row.baseline_loss, row.candidate_loss) for row in rows[:3])
    assert all(row.baseline_loss is None and row.candidate_loss is not None for row in rows[3:])
    assert make_report("longer").diagnosis.steps == (0, 1, 2)


def test_long_curves_keep_the_largest_differences(make_report, monkeypatch):
    monkeypatch.setattr(curves, "MOST_POINTS", 10)
    scalars = [
        StepScalars(
            step=n,
            baseline_loss=1.0,
            candidate_loss=1.0 + (n == 57),
            baseline_grad_norm=1.0,
            candidate_grad_norm=1.0,
        )
        for n in range(100)
    ]
    thin = curves.curves_of(replace(make_report("healthy").diagnosis, scalars=tuple(scalars)), {})
    assert len(thin.rows) == 10
    assert thin.each == 10
    assert 57 in [row.step for row in thin.rows]


def test_growth_follows_the_forward_pass_and_finds_the_divergent_dw(make_report):
    growth = growth_of(make_report("diverged").diagnosis)
    assert growth.modules.index("embedding.word_embeddings") < growth.modules.index(LINEAR)
    assert growth.modules.index(LINEAR) < growth.modules.index("output_layer")
    assert growth.steps[0] == 1  # the first divergent one
    apart = [p for p in growth.points[1, "wgrad"] if p.verdict is Verdict.DIVERGED]
    assert [growth.modules[p.module] for p in apart] == [LINEAR]
    assert apart[0].error > 0
    assert all(point.error == 0 for point in growth.points[1, "forward"])


def test_growth_of_a_healthy_pair_is_zero(make_report):
    growth = growth_of(make_report("healthy").diagnosis)
    assert growth.points
    assert all(p.error == 0 for points in growth.points.values() for p in points)


def test_operands_of_the_divergent_gemm_have_their_layouts(make_report):
    (gemm,) = make_report("diverged").facts.gemms
    assert [one.key.role for one in gemm.operands] == [Role.GRAD_OUTPUT, Role.INPUT, Role.WGRAD]
    pair = gemm.operands[0].pair
    assert pair.baseline.layout.contiguous
    assert not pair.candidate.layout.contiguous
    assert make_report("healthy").facts.gemms == ()


def test_groups_show_who_is_trained_otherwise(make_report):
    training = make_report("tolerated").facts.training
    assert [one.fqn for one in training.apart] == [f"{LINEAR}.bias"]
    assert training.apart[0].cells["weight_decay"] == ("0.1", "0")
    assert len(training.groups[Side.BASELINE]) == 1
    assert [group.parameters for group in training.groups[Side.CANDIDATE]] == [5, 1]
    healthy = make_report("healthy").facts.training
    assert healthy.apart == ()
    assert healthy.groups[Side.BASELINE] == healthy.groups[Side.CANDIDATE]


def test_configuration_is_judged_as_verify_judges_it(make_report):
    found = {one.difference.name: one for one in make_report("diverged").facts.training.differences}
    assert found["lr_warmup_iters"].severity in (Severity.ERROR, Severity.WARNING)
    assert found["<b>"].severity is None
    assert make_report("healthy").facts.training.differences == ()


def test_checks_without_data_are_named(make_report):
    outcomes = make_report("healthy").facts.training.outcomes
    assert any(outcome.skipped for outcome in outcomes)


def test_without_the_runs_the_gap_is_said(make_report):
    facts = report_facts(make_report("healthy").diagnosis)
    assert facts.training is None
    assert "not at hand" in facts.gaps[0]
    assert facts.runs[Side.BASELINE].path == make_report("healthy").diagnosis.baseline


@pytest.mark.parametrize(
    ("case", "calm"), [("healthy", True), ("diverged", False), ("not_certified", False), ("nan", False)]
)
def test_only_agreement_is_calm(case, calm, make_report):
    assert make_report(case).facts.answer.calm == calm
