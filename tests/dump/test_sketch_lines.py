"""Sketches and placements in a run: hostile ones are refused, and runs of schemas without them are read."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.cli import main
from mindspeed_precision.dump.format import (
    FINGERPRINT,
    FINGERPRINT_OF_OLDER,
    SKETCH_OF_OLDER,
    parse_line,
    to_json,
)
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.sketch import ROUNDOFF, pack
from mindspeed_precision.records import Digest, Level, Phase, RecordKey, Role, TensorRecord, Verdict
from mindspeed_precision.testing.fake_runs import write_fake_run

KEY = RecordKey(step=0, phase=Phase.FPROP, fqn="layer", role=Role.OUTPUT)


def line():
    digest = Digest(fingerprint=1, unordered=2, sketch=pack(np.arange(256.0), roundoff=ROUNDOFF))
    return TensorRecord(seq=0, key=KEY, shape=(300,), dtype="float32", layout=None, digest=digest)


def test_a_sketch_takes_less_than_two_kibibytes():
    bare = json.loads(to_json(line()))
    bare["sketch"] = None
    assert len(to_json(line())) - len(json.dumps(bare, separators=(",", ":"))) < 2048


INFINITE = base64.b64encode(b"\x00\x00\x00\xf0\x7f" + bytes(5 * 255)).decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": "A" * 4_000_000}, "4000000 characters"),
        ({"values": ""}, "0 characters"),
        ({"values": "A" * 1708}, "256 finite numbers"),
        ({"values": "A" * 1706 + "=="}, "256 finite numbers"),
        ({"values": "*" * 1708}, "no sketch"),
        ({"values": "é" * 1708}, "no sketch"),
        ({"values": INFINITE}, "finite"),
        ({"values": 3}, "ill-typed 'values'"),
        ({"roundoff": 0.0}, "roundoff 0.0"),
        ({"roundoff": -1e-9}, "roundoff"),
        ({"roundoff": 10**400}, "roundoff"),
        ({"roundoff": "small"}, "ill-typed 'roundoff'"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_hostile_sketch_is_one_clear_error(change, message):
    plain = json.loads(to_json(line()))
    assert len(plain["sketch"]["values"]) == 1708
    assert len(INFINITE) == 1708
    plain["sketch"] |= change
    with pytest.raises(DumpError, match=message) as caught:
        parse_line(json.dumps(plain), where="index.jsonl:7")
    assert "index.jsonl:7" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_keys_are_of_schemas_2_to_4():
    plain = json.loads(to_json(line()))
    del plain["placement"]
    assert parse_line(json.dumps(plain), where="here", schema=3) == line()
    with pytest.raises(DumpError, match="missing key 'placement'"):
        parse_line(json.dumps(plain), where="here")
    plain["placement"] = None
    del plain["part"]
    with pytest.raises(DumpError, match="missing key 'part'"):
        parse_line(json.dumps(plain), where="here")
    del plain["placement"]
    assert parse_line(json.dumps(plain), where="here", schema=2) == line()
    with pytest.raises(DumpError, match="unknown key 'sketch'"):
        parse_line(json.dumps(plain), where="here", schema=1)
    del plain["sketch"]
    with pytest.raises(DumpError, match="missing key 'sketch'"):
        parse_line(json.dumps(plain), where="here", schema=2)
    assert parse_line(json.dumps(plain), where="here", schema=1).digest.sketch is None


def as_schema(run, schema):
    """Rewrite a run as an older version wrote it."""
    manifest, index = run / "run.json", run / "rank00000" / "index.jsonl"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": schema}))
    lines = [json.loads(text) for text in index.read_text().splitlines()]
    lines[0] |= {"schema": schema, "fingerprint": FINGERPRINT_OF_OLDER, "sketch": SKETCH_OF_OLDER}
    for plain in lines:
        plain.pop("placement", None)
        for name in ("fingerprint", "unordered"):
            if plain["kind"] == "record":  # another definition has other values
                plain[name] = f"{int(plain[name], 16) ^ 0x5555:016x}"
        if schema < 3:
            plain.pop("part", None)
        if schema == 1:
            plain.pop("sketch", None)
        for parameter in plain.get("parameters", ()):
            if schema < 3:
                del parameter["placement"]
    index.write_text("".join(json.dumps(plain) + "\n" for plain in lines))
    (run / "rank00000" / "COMPLETE").unlink()
    return run


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_runs_of_an_older_schema_are_read_and_compared(schema, tmp_path):
    old = as_schema(write_fake_run(tmp_path / "old", level=Level.SKETCH), schema)
    other = as_schema(write_fake_run(tmp_path / "other", level=Level.SKETCH), schema)
    assert load_run(old).manifest["schema"] == schema
    found = any(record.digest.sketch is not None for record in load_run(old).ranks[0].records)
    assert found == (schema > 1)
    assert compare_runs(old, other).status is Verdict.IDENTICAL


@pytest.mark.parametrize("schema", [1, 2, 3])
@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_fingerprints_of_two_definitions_are_never_compared(schema, side, tmp_path, capsys):
    old = as_schema(write_fake_run(tmp_path / "old", level=Level.SKETCH), schema)
    new = write_fake_run(tmp_path / "new", level=Level.SKETCH)
    runs = (old, new) if side == "baseline" else (new, old)
    assert main(["compare", *map(str, runs)]) == 2
    said = capsys.readouterr().err
    for words in (str(old), FINGERPRINT_OF_OLDER, FINGERPRINT, "record this run again"):
        assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_where_elements_were_kept_they_are_compared(schema, tmp_path):
    old = as_schema(write_fake_run(tmp_path / "old", level=Level.TENSOR), schema)
    new = write_fake_run(tmp_path / "new", level=Level.TENSOR)
    found = compare_runs(old, new)
    assert found.status is Verdict.IDENTICAL
    assert any(FINGERPRINT_OF_OLDER in note and "elements" in note for note in found.notes)
    fault = write_fake_run(tmp_path / "fault", level=Level.TENSOR, weight_decay=0.0)
    assert compare_runs(old, fault).status is Verdict.DIVERGED
    assert not any(FINGERPRINT_OF_OLDER in note for note in compare_runs(new, fault).notes)


OWN = {"fqn": "w", "shape": [4, 3], "dtype": "float32", "trainable": True, "tied_to": ""}
SPLIT = {"dim": 0, "blocks": [[0, 2], [4, 2]]}
PLACEMENT = {"shape": [8, 3], "splits": [SPLIT], "partial": "", "copy_of": ""}


def parameters(placement):
    return json.dumps({"kind": "parameters", "parameters": [OWN | {"placement": placement}]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": [[0, 3]]}, "blocks that make"),
        ({"blocks": [[2, 2], [3, 2]]}, "disjoint blocks"),
        ({"blocks": [[-1, 4]]}, "no split"),
        ({"blocks": [[0, 4, 1]]}, "no split"),
        ({"blocks": ["all"]}, "no split"),
        ({"blocks": []}, "no split"),
        ({"blocks": [[0, 2.5]]}, "not a list of integers"),
        ({"dim": 7}, "no split"),
        ({"dim": -1}, "no split"),
        ({"dim": "0"}, "ill-typed 'dim'"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_hostile_split_is_one_clear_error(change, message):
    (parsed,) = parse_line(parameters(PLACEMENT), where="here").parameters
    assert parsed.placement.splits[0].blocks == ((0, 2), (4, 2))
    with pytest.raises(DumpError, match=message) as caught:
        parse_line(parameters(PLACEMENT | {"splits": [SPLIT | change]}), where="index.jsonl:2")
    assert "index.jsonl:2" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": [SPLIT, SPLIT]}, "ascending|ascend"),
        ({"splits": ["all"]}, "index.jsonl:2"),
        ({"shape": "8"}, "ill-typed 'shape'"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_hostile_placement_is_one_clear_error(change, message):
    with pytest.raises(DumpError, match=message) as caught:
        parse_line(parameters(PLACEMENT | change), where="index.jsonl:2")
    assert "index.jsonl:2" in str(caught.value)


def test_a_placement_of_schema_3_is_read():
    older = {**PLACEMENT, **SPLIT}
    del older["splits"]
    (parsed,) = parse_line(parameters(older), where="here", schema=3).parameters
    (today,) = parse_line(parameters(PLACEMENT), where="here").parameters
    assert parsed == today
    with pytest.raises(DumpError, match="unknown key"):
        parse_line(parameters(older), where="here")
    with pytest.raises(DumpError, match="no such kind of line"):
        parse_line('{"kind":"placement","number":0,"place":null,"reason":"x"}', where="here", schema=3)


def test_a_record_names_a_placement_that_was_declared():
    place = parse_line('{"kind":"placement","number":0,"place":null,"reason":"x"}', where="here").place
    text = to_json(replace(line(), place=place), place=0)
    assert parse_line(text, where="here", places=[place]).place == place
    with pytest.raises(DumpError, match="no such placement"):
        parse_line(text, where="here")
    wrong = parse_line(
        json.dumps({"kind": "placement", "number": 0, "place": PLACEMENT, "reason": ""}), where="here"
    ).place
    with pytest.raises(DumpError, match="not the placement of this tensor"):
        parse_line(text, where="here", places=[wrong])
    with pytest.raises(DumpError, match="or there is a reason"):
        parse_line('{"kind":"placement","number":0,"place":null,"reason":""}', where="here")


@pytest.mark.parametrize("part", [[1], [3, 1], [-1, 2], ["a", 2], [0, 1, 2]])
def test_a_hostile_part_is_one_clear_error(part):
    plain = json.loads(to_json(line())) | {"part": part}
    with pytest.raises(DumpError, match=r"no range of elements|not a list of integers"):
        parse_line(json.dumps(plain), where="here")
