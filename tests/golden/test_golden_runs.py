"""Runs of every schema that was ever written stay readable, and give the answers that they gave.

``MSP_UPDATE_GOLDEN=1`` writes the answers anew; the runs themselves are made once (``make_golden.py``).
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from mindspeed_precision.dump.format import READABLE
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.selected import load_selected
from mindspeed_precision.errors import DumpError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.elements import to_numbers
from mindspeed_precision.records import Phase, Verdict
from mindspeed_precision.report.examination import examination_text
from mindspeed_precision.report.verdict_json import verdict
from mindspeed_precision.verify.check import check_run

HERE = Path(__file__).parent
SCHEMAS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Return a function that unpacks the run of a schema."""
    directory = tmp_path_factory.mktemp("golden")

    def unpack(schema):
        place = directory / str(schema)
        if not place.exists():
            with tarfile.open(HERE / f"schema{schema}.tar.gz") as packed:
                packed.extractall(place, filter="data")
        return place / "run"

    return unpack


def answers(path):
    """Return what a run says, as plain data."""
    run = load_run(path)
    ranks = {}
    for number, rank in run.ranks.items():
        kept = [record for record in rank.records if record.payload is not None]
        ranks[str(number)] = {
            "complete": rank.complete,
            "steps": list(rank.steps),
            "records": len(rank.records),
            "parameters": [parameter.fqn for parameter in rank.parameters],
            "kept": len(kept),
            "first": [[one.key.describe(), f"{one.digest.fingerprint:016x}"] for one in rank.records[:3]],
            "elements": [float(value) for value in to_numbers(rank.payload(kept[0])).ravel()[:4]],
        }
    itself = compare_runs(path, path)
    return {
        "schema": run.manifest["schema"],
        "notes": list(run.notes),
        "ranks": ranks,
        "compare": {
            "status": itself.status.value,
            "identical": sum(one.verdict is Verdict.IDENTICAL for one in itself.comparisons),
            "findings": sorted({finding.id for finding in itself.findings}),
        },
        "check": sorted({finding.id for finding in check_run(path).findings}),
    }


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_run_of_every_schema_gives_its_answers(golden, schema):
    found = json.loads(json.dumps(answers(golden(schema))))
    file = HERE / f"answers{schema}.json"
    if os.environ.get("MSP_UPDATE_GOLDEN"):
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(file.read_text())
    assert found["schema"] == schema
    assert found["compare"]["status"] == "identical"
    assert found["compare"]["identical"] > 500


def test_every_schema_that_is_read_has_a_run():
    assert READABLE == SCHEMAS


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_changed_byte_is_seen(golden, schema, tmp_path):
    run = golden(schema)
    index = run / "rank00000" / "index.jsonl"
    kept = index.read_bytes()
    try:
        index.write_bytes(kept.replace(b'"step":1', b'"step":0', 1))
        with pytest.raises(DumpError):
            load_run(run)
    finally:
        index.write_bytes(kept)


@pytest.mark.parametrize("made", ["verdict", "examination"])
def test_files_that_programs_read_keep_their_keys(golden, made):
    """A key that goes, or means something else, is another ``schema`` of verdict.json or of --json."""
    run = golden(4)
    plain = (
        verdict(compare_runs(run, run)) if made == "verdict" else json.loads(examination_text(check_run(run)))
    )
    file = HERE / f"{made}-keys.json"
    found = {"schema": plain["schema"], "keys": sorted(plain)}
    if os.environ.get("MSP_UPDATE_GOLDEN"):
        file.write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(file.read_text())
    assert plain["schema"] == recorded["schema"]
    assert set(recorded["keys"]) <= set(found["keys"])


@pytest.mark.parametrize("schema", SCHEMAS)
def test_some_kinds_of_any_schema_are_read_as_the_whole_is(schema, golden):
    for rank in load_run(golden(schema)).ranks.values():
        kinds = frozenset((r.key.phase, r.key.role) for r in rank.records if r.key.phase is not Phase.FPROP)
        found = load_selected(rank.directory, kinds)
        wanted = tuple(r for r in rank.records if (r.key.phase, r.key.role) in kinds)
        assert wanted
        assert found.records == wanted
        assert (found.fingerprint, found.parameters) == (rank.fingerprint, rank.parameters)
