"""Sketches in a run: hostile ones are refused, and runs of schema 1, which has none, are read."""

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


def test_the_key_is_of_schema_2():
    plain = json.loads(to_json(line()))
    with pytest.raises(DumpError, match="unknown key 'sketch'"):
        parse_line(json.dumps(plain), where="here", schema=1)
    del plain["sketch"]
    with pytest.raises(DumpError, match="missing key 'sketch'"):
        parse_line(json.dumps(plain), where="here")
    assert parse_line(json.dumps(plain), where="here", schema=1).digest.sketch is None


def as_schema_1(run):
    """Rewrite a run as the version before wrote it."""
    manifest, index = run / "run.json", run / "rank00000" / "index.jsonl"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 1}))
    lines = [json.loads(text) for text in index.read_text().splitlines()]
    lines[0]["schema"] = 1
    for plain in lines:
        plain.pop("sketch", None)
    index.write_text("".join(json.dumps(plain) + "\n" for plain in lines))
    (run / "rank00000" / "COMPLETE").unlink()
    return run


def test_a_run_of_schema_1_is_read_and_compared(tmp_path):
    old = as_schema_1(write_fake_run(tmp_path / "old"))
    new = write_fake_run(tmp_path / "new", level=Level.SKETCH)
    assert load_run(old).manifest["schema"] == 1
    assert all(record.digest.sketch is None for record in load_run(old).ranks[0].records)
    assert any(record.digest.sketch is not None for record in load_run(new).ranks[0].records)
    assert compare_runs(old, new).status is Verdict.IDENTICAL
