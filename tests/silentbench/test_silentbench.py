"""SilentBench is whole, and what is quick of it is found; ``make silentbench`` runs all of it."""

from __future__ import annotations

import pytest
import yaml

from mindspeed_precision.records import Phase, Role
from silentbench.card import LIST
from silentbench.cases import every
from silentbench.score import COMMANDS

BUGS = yaml.safe_load(LIST.read_text(encoding="utf-8"))
QUICK = [case for case in every().values() if case.quick]


def test_every_bug_of_the_list_is_a_case_or_says_why_not():
    cases = set(every())
    left_out = {id_ for id_, bug in BUGS.items() if bug.get("not_here")}
    assert cases | left_out == set(BUGS)
    assert cases & left_out == set()


@pytest.mark.parametrize("case", every().values(), ids=every())
def test_a_case_is_well_formed(case):
    assert case.sources
    assert case.faulty.world <= 4
    assert case.twin.name not in (case.faulty.name, case.twin_reference.name)
    assert case.faulty.name != case.reference.name
    for answer in case.answers:
        assert set(answer.by) <= set(COMMANDS)
        assert answer.phases
        assert answer.fqn
        assert answer.ids
        assert set(answer.phases) <= {phase.value for phase in Phase}
        assert set(answer.roles) <= {role.value for role in Role}
        assert -1 <= answer.step < case.faulty.steps


@pytest.fixture(scope="module")
def runs(megatron, tmp_path_factory):
    """Record what the quick cases need."""
    from silentbench.trainings import record_all

    folder = tmp_path_factory.mktemp("silentbench")
    assert record_all([t for case in QUICK for t in case.trainings], folder, megatron("0.16.1")) == {}
    return folder


@pytest.mark.torch
@pytest.mark.megatron
@pytest.mark.matrix
@pytest.mark.parametrize("case", QUICK, ids=[case.id for case in QUICK])
def test_a_bug_is_detected_and_its_twin_is_not_accused(runs, case):
    from silentbench.score import score

    given = score(case, runs)
    assert given.any_of("detected")
    assert given.false_alarms == ()
