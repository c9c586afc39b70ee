"""Dumps of msprobe compared: with each other, and with our own run of the same training."""

from __future__ import annotations

import json

import pytest

from mindspeed_precision import compare_runs, load_run
from mindspeed_precision.records import Phase, Severity, Verdict
from mindspeed_precision.report.exit_status import exit_status

L0 = "torch-L0-statistics-statistics"
MD5 = "torch-L0-statistics-md5"
TENSOR = "torch-L0-tensor-statistics"
WEIGHT = "Module.fc2.Linear.parameters_grad.0"


def changed(dump, change, step="step0"):
    file = dump / step / "proc0" / "dump.json"
    plain = json.loads(file.read_text())
    change(plain["data"])
    file.write_text(json.dumps(plain))
    return dump


def scaled(factor):
    def change(data):
        leaf = data[WEIGHT]["weight"][0]
        for name in ("Max", "Min", "Mean", "Norm"):
            leaf[name] *= factor

    return change


@pytest.mark.parametrize("name", [L0, "torch-L1-statistics-statistics", "torch-mix-statistics-statistics"])
def test_a_dump_agrees_with_itself_but_is_not_called_identical(golden, copied, name):
    found = compare_runs(golden(name), copied(name))
    assert found.status is Verdict.WITHIN_TOLERANCE
    assert not found.origins
    assert not [f for f in found.findings if f.severity is Severity.ERROR]


def test_checksums_make_it_identical(golden, copied):
    found = compare_runs(golden(MD5), copied(MD5))
    assert found.status is Verdict.IDENTICAL
    assert exit_status(found)[0] == 0


def test_numbers_agree_where_one_dump_has_elements_too(golden):
    found = compare_runs(golden(L0) / "step0", golden(TENSOR))
    assert found.status is Verdict.WITHIN_TOLERANCE


@pytest.mark.parametrize("factor", [1.05, 1 + 1e-6])
def test_a_changed_gradient_is_found(golden, copied, factor):
    found = compare_runs(golden(L0), changed(copied(L0), scaled(factor)))
    assert found.status is Verdict.DIVERGED
    assert found.first_divergence.key.fqn == "fc2.weight"
    assert found.first_divergence.key.phase is Phase.ACCUMULATE
    assert "Norm" in found.first_divergence.comparison.reason
    assert [f.id for f in found.findings if f.severity is Severity.ERROR] == ["wgrad.seen_in_main_grad"]


def test_a_changed_checksum_is_found_where_the_numbers_differ_too(golden, copied):
    def change(data):
        scaled(1 + 1e-6)(data)
        data[WEIGHT]["weight"][0]["md5"] = "deadbeef"

    found = compare_runs(golden(MD5), changed(copied(MD5), change))
    assert found.status is Verdict.DIVERGED
    assert found.first_divergence.key.fqn == "fc2.weight"


def test_a_checksum_of_a_gradient_alone_is_a_difference(golden, copied):
    """Nothing says that it was taken too late: the gradient is the end of the step."""

    def change(data):
        data[WEIGHT]["weight"][0]["md5"] = "deadbeef"

    found = compare_runs(golden(MD5), changed(copied(MD5), change))
    assert found.status is Verdict.DIVERGED


def test_a_checksum_that_was_taken_too_late_is_no_difference(golden, copied):
    def change(data):
        data["Module.fc1.Linear.forward.0"]["output"][0]["md5"] = "deadbeef"

    found = compare_runs(golden(MD5), changed(copied(MD5), change))
    assert found.status is Verdict.WITHIN_TOLERANCE
    assert any("1 checksums differ" in note for note in found.notes)


def test_nan_on_one_side_is_found(golden, copied):
    def change(data):
        data["Module.fc1.Linear.forward.0"]["output"][0].update(Max=float("nan"), Min=float("nan"))

    found = compare_runs(golden(L0), changed(copied(L0), change))
    assert found.status is Verdict.DIVERGED
    assert found.first_divergence.key.fqn == "fc1"
    assert "one side only" in found.first_divergence.comparison.reason


def test_two_frameworks_agree_within_rounding(golden):
    found = compare_runs(golden(L0) / "step0", golden("mindspore-L0-statistics-statistics") / "step0")
    assert found.policy.startswith("cross_framework")
    assert found.status is Verdict.WITHIN_TOLERANCE
    assert found.coverage.unmatched == 0


def test_a_fault_in_one_of_two_frameworks_is_found(golden, copied):
    dump = changed(copied(L0), scaled(1.01))
    found = compare_runs(dump / "step0", golden("mindspore-L0-statistics-statistics") / "step0")
    assert found.status is Verdict.DIVERGED
    assert found.first_divergence.key.fqn == "fc2.weight"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Our own runs of the training that the golden dumps are of: healthy, and with a fault in one dW."""
    pytest.importorskip("torch")
    from small_net import torch_net, torch_steps

    from mindspeed_precision.session import Session

    def record(name, scale, level):
        out = tmp_path_factory.mktemp("runs") / name
        net, optimizer = torch_net(scale)
        overrides = ["determinism.enabled=false", f"capture.level={level}"]
        with Session(model=[net], optimizer=optimizer, out=out, overrides=overrides) as session:
            torch_steps(net, optimizer, 2, after=lambda loss: session.step(loss=loss))
        return out

    return {
        "healthy": record("healthy", 1.0, "statistics"),
        "tensor": record("tensor", 1.0, "tensor"),
        "fault": record("fault", 1.05, "statistics"),
    }


def aligned_share(found):
    (note,) = [note for note in found.notes if "of modules and parameters aligned" in note]
    return float(note.partition("(")[2].partition(" %")[0])


@pytest.mark.torch
@pytest.mark.parametrize(
    ("side", "name"),
    [
        ("healthy", L0),
        ("healthy", "torch-mix-statistics-statistics"),
        ("healthy", TENSOR),
        ("tensor", MD5),
        ("tensor", TENSOR),
    ],
)
def test_our_run_agrees_with_the_dump_of_the_same_training(golden, ours, side, name):
    for one, two in ((ours[side], golden(name)), (golden(name), ours[side])):
        found = compare_runs(one, two)
        assert found.status in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE), found.findings
        assert aligned_share(found) >= 95
        assert not [f for f in found.findings if f.severity is not Severity.INFO], found.findings
        assert found.policy.startswith("msprobe:")
        assert any("not captured by msprobe" in note for note in found.notes)


@pytest.mark.torch
@pytest.mark.parametrize("name", [L0, "torch-mix-statistics-statistics", TENSOR])
def test_a_fault_in_our_dw_is_found_beside_the_dump(golden, ours, name):
    found = compare_runs(golden(name), ours["fault"])
    assert found.status is Verdict.DIVERGED
    assert found.first_divergence.key.fqn == "fc2.weight"
    assert exit_status(found)[0] == 1


@pytest.mark.torch
def test_a_dump_of_operations_alone_certifies_nothing(golden, ours):
    found = compare_runs(ours["healthy"], golden("torch-L1-statistics-statistics"))
    assert found.status is Verdict.MISSING
    assert exit_status(found)[0] == 2
    assert any("dump with level L0 or mix" in note for note in found.notes)
    (vacuous,) = (finding for finding in found.findings if finding.id == "vacuous.no_records")
    assert "a dump of level L1 has operations alone" in vacuous.title
    assert "level L0 or mix" in vacuous.remedy


@pytest.mark.torch
def test_a_dump_of_other_checksums_certifies_nothing(golden, ours):
    found = compare_runs(ours["healthy"], golden("torch-L0-statistics-xor"))
    assert found.status is Verdict.MISSING
    (finding,) = (finding for finding in found.findings if finding.id == "coverage.not_judged")
    assert "whose bits are not known" in finding.title
    assert "summary_mode" in finding.remedy
    assert "bits differ" not in finding.title


@pytest.mark.torch
def test_a_gradient_that_the_dump_lacks_is_said(copied, ours):
    def change(data):
        del data[WEIGHT]

    dump = changed(changed(copied(L0), change), lambda data: data.pop(WEIGHT), "step1")
    found = compare_runs(ours["healthy"], dump)
    assert found.status is not Verdict.WITHIN_TOLERANCE
    assert any("fc2.weight" in str(u.key) for u in found.unmatched)


@pytest.mark.torch
def test_what_a_dump_can_never_hold_is_counted_and_no_loss(golden, ours):
    found = compare_runs(ours["healthy"], golden(L0))
    assert found.coverage.unmatched == 0
    (note,) = [note for note in found.notes if "not captured by msprobe" in note]
    assert "optimizer/exp_avg" in note
    total = sum(len(rank.records) for rank in load_run(ours["healthy"]).ranks.values())
    counted = sum(int(word) for word in note.replace(",", " ").split() if word.isdigit())
    assert counted + found.coverage.matched + 2 >= total - 12  # parts of gradients are aligned, not judged
