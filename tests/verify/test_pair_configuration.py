"""Configuration, environment, versions and schedules of two runs, by meaning."""

from __future__ import annotations

import json

import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.records import Severity
from mindspeed_precision.verify.verify import verify_runs


def test_equal_runs_have_no_finding(verify):
    assert verify() == {}
    answer = verify.answer
    assert not answer.vacuous
    assert verify.outcome("config.differs").exercised > 10
    assert verify.outcome("schedule.lr_differs").exercised == 20


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("adam_beta2", 0.999, Severity.ERROR),
        ("rotary_base", 500000, Severity.ERROR),
        ("overlap_grad_reduce", True, Severity.WARNING),
        ("log_interval", 1, Severity.INFO),
    ],
)
def test_an_argument_is_graded_by_what_it_does(verify, name, value, severity):
    found = verify(candidate={"arguments": {name: value}})
    (finding,) = found["config.differs"]
    assert finding.severity is severity
    assert finding.evidence[0].startswith(f"{name}: ")
    assert finding.evidence[0].count(":") >= 2, "it says why"


def test_an_argument_of_no_table_is_a_warning_that_says_so(verify):
    found = verify(candidate={"arguments": {"my_own_flag": 3}})
    (finding,) = found["config.unknown_argument"]
    assert finding.severity is Severity.WARNING
    assert "my_own_flag" in finding.evidence[0]


def test_numbers_are_compared_as_numbers(verify):
    found = verify(
        {"arguments": {"adam_eps": 1e-8, "params_dtype": "torch.bfloat16", "clip_grad": 1}},
        {"arguments": {"adam_eps": "1e-08", "params_dtype": "bfloat16", "clip_grad": 1.0}},
    )
    assert found == {}


def test_other_paths_to_the_same_data_are_information(verify):
    found = verify(candidate={"arguments": {"data_path": ["copy"]}})
    (finding,) = found["config.differs"]
    assert finding.severity is Severity.INFO
    assert "the batches of all recorded steps are the same" in finding.evidence[0]


def test_other_data_behind_other_paths_is_an_error(verify):
    found = verify(candidate={"arguments": {"data_path": ["other"]}, "seed": 2})
    assert any(
        "data_path" in line
        for f in found["config.differs"]
        if f.severity is Severity.ERROR
        for line in f.evidence
    )


class TestSchedules:
    def test_other_options_with_the_same_curve_are_information(self, verify):
        found = verify(
            {"arguments": {"lr_warmup_iters": 2, "lr_decay_iters": None}},
            {"arguments": {"lr_warmup_iters": 0, "lr_warmup_fraction": 0.1, "lr_decay_iters": 20}},
        )
        assert set(found) == {"config.differs"}
        assert {finding.severity for finding in found["config.differs"]} == {Severity.INFO}

    def test_the_step_where_curves_part_is_named(self, verify):
        found = verify(candidate={"arguments": {"lr_warmup_iters": 4}})
        (finding,) = found["schedule.lr_differs"]
        assert finding.where.step == 1  # step 0 has lr 0 on both sides
        assert "largest difference at step" in finding.evidence[1]

    def test_weight_decay_is_a_curve(self, verify):
        growing = {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}
        found = verify(
            {"arguments": growing}, {"arguments": {**growing, "weight_decay_incr_style": "cosine"}}
        )
        assert found["schedule.weight_decay_differs"][0].where.step == 1

    def test_a_ramp_up_changes_every_curve(self, verify):
        found = verify(candidate={"arguments": {"rampup_batch_size": [1, 1, 6]}})
        assert found["schedule.batch_size_differs"][0].where.step == 0
        assert found["schedule.consumed_differs"][0].where.step == 1

    def test_a_longer_training_with_the_same_curve_is_a_warning(self, verify):
        constant = {"lr_decay_style": "constant", "lr_warmup_iters": 0}
        found = verify({"arguments": constant}, {"arguments": {**constant, "train_iters": 30}})
        assert found["schedule.steps_differ"][0].severity is Severity.WARNING
        assert "schedule.lr_differs" not in found

    def test_what_a_run_does_not_say_is_said(self, verify):
        verify(candidate={"arguments": {"train_iters": None}})
        skipped = verify.outcome("schedule.lr_differs").skipped
        assert skipped == "the candidate says no train_samples"


class TestEnvironment:
    def test_variables_by_meaning(self, verify):
        found = verify(
            {"manifest": {"environment": {"HCCL_DETERMINISTIC": "true", "HCCL_IF_BASE_PORT": "1"}}},
            {"manifest": {"environment": {"HCCL_IF_BASE_PORT": "2"}}},
        )
        error, information = found["env.differs"]
        assert error.severity is Severity.ERROR
        assert "HCCL_DETERMINISTIC: true in the baseline, not set" in error.evidence[0]
        assert information.severity is Severity.INFO

    def test_versions_of_cann_and_driver(self, verify):
        one = {"torch": "2.7.1", "cann": "8.2.RC1", "driver": "25.0"}
        found = verify(
            {"manifest": {"versions": one}}, {"manifest": {"versions": {**one, "cann": "8.3.RC1"}}}
        )
        (finding,) = found["env.versions_differ"]
        assert finding.severity is Severity.WARNING
        assert finding.evidence == (
            "cann: 8.2.RC1 in the baseline, 8.3.RC1 in the candidate: its kernels, defaults or formulas may "
            "have changed",
        )


MINDFORMERS = """
optimizer: {type: AdamW, betas: [0.9, 0.95], eps: 1.e-8, weight_decay: 0.1}
lr_schedule: {learning_rate: 0.01, lr_end: 0.001, warmup_steps: 2}
model: {model_config: {rms_norm_eps: 1.e-5, hidden_act: silu, num_hidden_layers: 2, of_its_own: 1}}
"""


class TestAcrossFrameworks:
    ARGUMENTS = {"adam_beta1": 0.9, "adam_eps": 1e-8, "norm_epsilon": 1e-5, "swiglu": True, "num_layers": 2}  # noqa: RUF012
    NATIVE = {"config": {}, "framework": {"name": "mindspore", "version": "2.7.1"}}  # noqa: RUF012

    def run(self, verify, tmp_path, text):
        from mindspeed_precision.records import Side

        file = tmp_path / "run.yaml"
        file.write_text(text)
        return verify(
            {"arguments": self.ARGUMENTS},
            {"manifest": self.NATIVE},
            configurations={Side.CANDIDATE: file},
        )

    def test_mindformers_yaml_says_the_same(self, verify, tmp_path):
        assert self.run(verify, tmp_path, MINDFORMERS) == {}
        assert verify.outcome("config.differs").exercised == 10
        assert any("1 keys of the candidate" in note for note in verify.answer.notes)

    @pytest.mark.parametrize(
        ("change", "argument"),
        [
            (("0.95", "0.999"), "adam_beta2"),
            (("rms_norm_eps: 1.e-5", "rms_norm_eps: 1.e-6"), "norm_epsilon"),
            (("hidden_act: silu", "hidden_act: gelu"), "swiglu"),
        ],
    )
    def test_mindformers_yaml_says_otherwise(self, verify, tmp_path, change, argument):
        found = self.run(verify, tmp_path, MINDFORMERS.replace(*change))
        errors = [f for f in found["config.differs"] if f.severity is Severity.ERROR]
        assert [line.split(":")[0] for line in errors[0].evidence] == [argument]

    def test_without_its_file_nothing_is_claimed(self, verify):
        found = verify(candidate={"manifest": self.NATIVE})
        assert found == {}
        assert "--candidate-config" in verify.outcome("config.differs").skipped


def test_the_command_prints_and_ends_with_1(verify, capsys):
    verify(candidate={"arguments": {"adam_beta2": 0.5}})
    sides = list(verify.answer.subjects.values())
    assert main(["verify", *sides]) == 1
    assert "adam_beta2: 0.95 in the baseline, 0.5 in the candidate" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["verify", sides[0], sides[0], "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["findings"] == []
    assert len(plain["tables"]["groups"]) > 6, "with --json every parameter"


def test_a_directory_that_is_no_run_is_one_line(tmp_path, capsys):
    assert main(["verify", str(tmp_path), str(tmp_path)]) == 2
    assert "not a run" in capsys.readouterr().err


def test_it_is_a_public_name():
    import mindspeed_precision

    assert mindspeed_precision.verify_runs is verify_runs

    def test_variables_of_one_framework_alone_are_left_out_and_said(self, verify):
        one = {"framework": {"name": "torch"}, "environment": {"PYTHONHASHSEED": "1"}}
        two = {"framework": {"name": "mindspore"}, "environment": {"PYTHONHASHSEED": "1"}}
        two["environment"]["HCCL_DETERMINISTIC"] = "true"
        assert "env.differs" not in verify({"manifest": one}, {"manifest": two})
        assert "one framework alone" in verify.outcome("env.differs").skipped
        two["environment"]["PYTHONHASHSEED"] = "2"
        assert "env.differs" in verify({"manifest": one}, {"manifest": two})
