"""Parameter groups of two runs."""

from __future__ import annotations

import json
import shutil

import pytest

from mindspeed_precision.testing.fake_runs import EMBEDDING, FakeRun, constant, plant, write_fake_run
from mindspeed_precision.verify.verify import verify_runs

BIASES = frozenset(f"decoder.layers.{layer}.mlp.linear_fc1.bias" for layer in range(2))
BIAS = "decoder.layers.0.mlp.linear_fc1.bias"
HEALTHY = {"undecayed": BIASES}


def test_equal_groups(verify):
    assert verify(both=HEALTHY) == {}
    assert verify.outcome("optimizer.groups_differ").exercised == 6
    assert verify.outcome("optimizer.weight_decay").exercised == 2 * 6 * 6
    assert verify.answer.tables == {}


def test_weight_decay_on_biases(verify):
    found = verify(HEALTHY, {})
    (group,) = found["optimizer.groups_differ"]
    assert f"{BIAS}: wd_mult 0.0 in the baseline, 1.0 in the candidate" in group.evidence
    (number,) = found["optimizer.weight_decay"]
    assert "weight_decay 0 in the baseline and 0.1 in the candidate to 2 parameters" in number.title
    assert set(found) == {"optimizer.groups_differ", "optimizer.weight_decay"}


@pytest.mark.parametrize(
    ("change", "id_"),
    [({"beta2": 0.999}, "optimizer.beta"), ({"eps": 1e-5}, "optimizer.eps"), ({"lr": 0.02}, "optimizer.lr")],
)
def test_a_number_that_is_applied_to_all(verify, change, id_):
    found = verify(candidate=change)
    assert "to 6 parameters" in found[id_][0].title


def test_a_number_that_changes_later_is_found_at_its_step(verify):
    later = plant(phase="optimizer", role="hyperparameter", slot="lr", step=1, value=constant(0.005))
    found = verify(candidate={"plants": [later]})
    assert found["optimizer.lr"][0].where.step == 1


def test_another_step_counter(verify):
    ahead = plant(phase="optimizer", role="hyperparameter", slot="step", value=lambda value: value + 1)
    found = verify(candidate={"plants": [ahead]})
    assert set(found) == {"optimizer.step_counter"}


def test_in_no_group_and_twice(verify):
    found = verify(candidate={"ungrouped": frozenset({BIAS}), "twice": frozenset({f"{EMBEDDING}.weight"})})
    evidence = "\n".join(found["optimizer.groups_differ"][0].evidence)
    assert f"{BIAS}: in a group in the baseline, in no group in the candidate" in evidence
    assert f"{EMBEDDING}.weight: in 1 groups in the baseline, in 2 in the candidate" in evidence


def test_frozen_in_one_run(verify):
    found = verify(candidate={"frozen": frozenset({BIAS})})
    assert (
        f"{BIAS}: trained in the baseline, frozen in the candidate"
        in found["model.frozen_parameter"][0].evidence
    )


class TestTable:
    @pytest.fixture
    def sides(self, tmp_path):
        one = write_fake_run(tmp_path / "one", FakeRun(undecayed=BIASES))
        return one, write_fake_run(tmp_path / "two", FakeRun())

    def test_rows_that_differ(self, sides):
        lines = verify_runs(*sides).tables["groups"]
        assert [line.split()[0] for line in lines[1:-1:2]] == sorted(BIASES)
        assert lines[1].split()[1] == "baseline"
        assert lines[2].split()[0] == "candidate"
        assert lines[-1] == "4 parameters are the same on both sides (--all shows them)"

    def test_every_row(self, sides):
        lines = verify_runs(*sides, every=True).tables["groups"]
        assert sum(" both " in line for line in lines) == 4
        assert len(lines) == 1 + 4 + 2 * 2

    def test_runs_without_groups_are_compared_by_what_was_applied(self, sides):
        for side in sides:
            (side / "rank00000" / "effective.json").unlink()
        answer = verify_runs(*sides)
        assert {finding.id for finding in answer.findings} == {"optimizer.weight_decay"}


def test_what_a_rank_held_is_checked_when_it_is_read(tmp_path):
    from mindspeed_precision.errors import DumpError

    run = write_fake_run(tmp_path / "run")
    (run / "rank00000" / "effective.json").write_text(json.dumps({"schema": 4, "groups": 3}))
    with pytest.raises(DumpError):
        verify_runs(run, run)
    shutil.rmtree(run)


def spread(directory, ranks, value):
    """Write a run whose groups say whether they are of experts that are spread over ranks."""
    run = write_fake_run(directory, FakeRun(ranks=ranks))
    for file in run.glob("rank*/effective.json"):
        state = json.loads(file.read_text())
        for group in state["groups"]:
            group["settings"]["is_expert_parallel"] = value
        file.write_text(json.dumps(state))
    return run


@pytest.mark.parametrize(("ranks", "differ"), [(1, True), (2, False)])
def test_experts_that_are_spread_over_ranks_are_another_group_in_one_layout_alone(tmp_path, ranks, differ):
    one = spread(tmp_path / "baseline", 1, False)
    found = verify_runs(one, spread(tmp_path / "candidate", ranks, True)).findings
    assert ("optimizer.groups_differ" in {finding.id for finding in found}) is differ
