"""Sketches and placements in a run: hostile ones are refused, and runs of schemas without them are read."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from mindspeed_precision.dump.format import parse_line, to_json
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


def test_the_keys_are_of_schemas_2_and_3():
    plain = json.loads(to_json(line()))
    del plain["part"]
    assert parse_line(json.dumps(plain), where="here", schema=2) == line()
    with pytest.raises(DumpError, match="missing key 'part'"):
        parse_line(json.dumps(plain), where="here")
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
    lines[0]["schema"] = schema
    for plain in lines:
        plain.pop("part", None)
        if schema == 1:
            plain.pop("sketch", None)
        for parameter in plain.get("parameters", ()):
            del parameter["placement"]
    index.write_text("".join(json.dumps(plain) + "\n" for plain in lines))
    (run / "rank00000" / "COMPLETE").unlink()
    return run


@pytest.mark.parametrize("schema", [1, 2])
def test_a_run_of_an_older_schema_is_read_and_compared(schema, tmp_path):
    old = as_schema(write_fake_run(tmp_path / "old", level=Level.SKETCH), schema)
    new = write_fake_run(tmp_path / "new", level=Level.SKETCH)
    assert load_run(old).manifest["schema"] == schema
    found = any(record.digest.sketch is not None for record in load_run(old).ranks[0].records)
    assert found == (schema == 2)
    assert any(record.digest.sketch is not None for record in load_run(new).ranks[0].records)
    assert compare_runs(old, new).status is Verdict.IDENTICAL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": [[0, 3]]}, "blocks that make"),
        ({"blocks": [[2, 2], [3, 2]]}, "blocks that make"),
        ({"blocks": [[-1, 4]]}, "no placement"),
        ({"blocks": [[0, 4, 1]]}, "no placement"),
        ({"blocks": ["all"]}, "no placement"),
        ({"blocks": [[0, 2.5]]}, "not a list of integers"),
        ({"dim": 7}, "no placement"),
        ({"dim": -1}, "no placement"),
        ({"shape": "8"}, "ill-typed 'shape'"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_hostile_placement_is_one_clear_error(change, message):
    placement = {"shape": [8, 3], "dim": 0, "blocks": [[0, 2], [4, 2]], "partial": "", "copy_of": ""}
    own = {"fqn": "w", "shape": [4, 3], "dtype": "float32", "trainable": True, "tied_to": ""}
    whole = {"kind": "parameters", "parameters": [own | {"placement": placement}]}
    (parsed,) = parse_line(json.dumps(whole), where="here").parameters
    assert parsed.placement.blocks == ((0, 2), (4, 2))
    whole["parameters"][0]["placement"] = placement | change
    with pytest.raises(DumpError, match=message) as caught:
        parse_line(json.dumps(whole), where="index.jsonl:2")
    assert "index.jsonl:2" in str(caught.value)


@pytest.mark.parametrize("part", [[1], [3, 1], [-1, 2], ["a", 2], [0, 1, 2]])
def test_a_hostile_part_is_one_clear_error(part):
    plain = json.loads(to_json(line())) | {"part": part}
    with pytest.raises(DumpError, match=r"no range of elements|not a list of integers"):
        parse_line(json.dumps(plain), where="here")
