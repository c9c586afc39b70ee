"""What ``run.json`` and ``effective.json`` may hold: anything else is one clear error, whoever reads it."""

from __future__ import annotations

import copy
import json

import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.testing.fake_runs import write_fake_run
from mindspeed_precision.verify.check import check_run

WRONG = (5, "x", [1], [None], True)
HUGE = 10**400


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_fake_run(
        tmp_path_factory.mktemp("whole") / "run",
        steps=1,
        manifest={"config": {"megatron_args": {"lr": 0.1}}, "settings": {"capture": {"rules": []}}},
    )


def changed(path, document, *, at, value):
    """Write a document with one value replaced."""
    plain = copy.deepcopy(document)
    inner = plain
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    path.write_text(json.dumps(plain))


def refused(run, file):
    with pytest.raises(DumpError) as caught:
        load_run(run)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [*WRONG, HUGE], ids=repr)
@pytest.mark.parametrize(
    "at",
    [
        ("config",),
        ("config", "megatron_args"),
        ("config", "ddp_config"),
        ("settings", "capture"),
        ("settings", "capture", "rules"),
    ],
    ids=".".join,
)
def test_a_section_of_the_manifest_that_is_none(whole, at, value):
    path = whole / "run.json"
    document = json.loads(path.read_text())
    try:
        changed(path, document, at=at, value=value)
        refused(whole, "run.json")
    finally:
        path.write_text(json.dumps(document))
    assert load_run(whole).ranks


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("schema",), 99),
        *((("groups", 0, "settings"), value) for value in WRONG),
        *((("groups", 0, "parameters"), value) for value in (5, [1], [{}])),
        (("groups", 0, "parameters", 0, "fqn"), 5),
        (("groups", 0, "parameters", 0, "range"), [1]),
        (("groups", 0, "settings", "lr"), HUGE),
        (("groups", 0, "settings", "lr"), {}),
        (("modules",), [5]),
        (("tied",), {"a": 5}),
    ],
    ids=repr,
)
def test_an_entry_of_what_took_effect_that_is_none(whole, at, value):
    path = next(whole.glob("rank*/effective.json"))
    document = json.loads(path.read_text())
    try:
        changed(path, document, at=at, value=value)
        refused(whole, "effective.json")
    finally:
        path.write_text(json.dumps(document))
    assert load_run(whole).ranks


@pytest.mark.parametrize("finding", [{"evidence": 5}, {"evidence": None}, {"severity": {}, "title": [1]}])
def test_a_reported_finding_of_another_form_is_still_shown(whole, finding):
    path = whole / "run.json"
    document = json.loads(path.read_text())
    try:
        changed(path, document, at=("findings",), value=[{"id": "coverage.x", **finding}])
        assert "coverage.x" in {one.id for one in check_run(whole).findings}
    finally:
        path.write_text(json.dumps(document))
