"""Every way in which a run can be broken: one clear error, or a note."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.format import parse_line
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Digest, Phase, RankCoordinates, RecordKey, Role, TensorRecord
from mindspeed_precision.testing.fake_runs import write_fake_run
from mindspeed_precision.verify.check import check_run


def record(seq, step):
    key = RecordKey(step=step, microbatch=0, phase=Phase.FPROP, fqn="layer", role=Role.OUTPUT)
    digest = Digest(fingerprint=seq, unordered=seq)
    return TensorRecord(seq=seq, key=key, shape=(4,), dtype="float32", layout=None, digest=digest)


def make(run, *, ranks=(0,), world_size=1, complete=True, settings=None):
    create_run(run, {"parallel": {"world_size": world_size}, "settings": settings or {}})
    for rank in ranks:
        writer = RankWriter(run, coordinates=RankCoordinates(rank=rank, world_size=world_size))
        for step in (0, 1):
            payload = {2 * step: HostTensor(bits=np.arange(4, dtype=np.uint32), dtype="float32")}
            writer.write_step(
                step, [record(2 * step, step), record(2 * step + 1, step)], payload, microbatches=1
            )
        writer.close(complete=complete)
    return run


@pytest.fixture
def run(tmp_path):
    return make(tmp_path / "run")


@pytest.fixture
def crashed(tmp_path):
    return make(tmp_path / "run", complete=False)


def index(run):
    return run / "rank00000" / "index.jsonl"


def edit(path, change):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(change(lines)))


def refused(run, *words):
    with pytest.raises(DumpError) as caught:
        load_run(run)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return caught.value


def test_no_directory_a_file_an_empty_one_and_no_run(tmp_path):
    refused(tmp_path / "absent", "no such run directory", "absent")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "not a directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "an empty directory", "run.json")
    refused(tmp_path, "not a run", "empty, file", "run.json")


@pytest.mark.parametrize("schema", ["5", "0", '"1"', "null", "1.0", "true"])
def test_another_schema(run, schema):
    (run / "run.json").write_text(f'{{"schema": {schema}}}')
    refused(run, "another schema", "expected 1 or 2 or 3 or 4")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1, "schema": 1}', '{"schema": NaN}'])
def test_a_manifest_that_is_broken(run, text):
    (run / "run.json").write_text(text)
    refused(run, "run.json", "JSON")


def test_a_run_without_ranks(run):
    shutil.rmtree(run / "rank00000")
    refused(run, "no rank of this run wrote anything")


def test_a_truncated_sealed_index_is_an_error(run):
    edit(index(run), lambda lines: lines[:-1])
    refused(run, "truncated index", "index.jsonl", "found 6 whole lines", "expected 7")
    index(run).write_bytes(b"")
    refused(run, "found 0 whole lines")


def test_a_sealed_index_that_is_gone_is_an_error(run):
    index(run).unlink()
    refused(run, "the index is gone")


def test_a_changed_sealed_index_is_an_error(run):
    edit(index(run), lambda lines: [line.replace('"layer"', '"other"') for line in lines])
    refused(run, "changed since it was sealed")
    (run / "rank00000" / "COMPLETE").write_text("{}")
    refused(run, "COMPLETE", "missing key")


def test_a_torn_last_line_is_a_crash(crashed):
    assert load_run(crashed).ranks[0].steps == (0, 1)
    data = index(crashed).read_bytes()
    for cut in (1, 30, 400):
        index(crashed).write_bytes(data[:-cut])
        loaded = load_run(crashed)
        assert loaded.ranks[0].steps == (0,)
        assert len(loaded.ranks[0].records) == 2
        assert any("did not end as planned" in note and "after step 0" in note for note in loaded.notes)
        assert any("is not whole" in note and "torn last line" in note for note in loaded.notes)


def test_a_step_without_its_marker_is_dropped(crashed):
    edit(index(crashed), lambda lines: lines[:-1])
    loaded = load_run(crashed)
    assert loaded.ranks[0].steps == (0,)
    assert any("step 1 is not whole: dropped 2 records" in note for note in loaded.notes)


def test_a_corrupt_line_in_the_middle_names_its_place(crashed):
    edit(index(crashed), lambda lines: [*lines[:2], "{broken\n", *lines[3:]])
    refused(crashed, "index.jsonl:3", "JSON")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plain: plain.pop("role"), ["missing key 'role'"]),
        (lambda plain: plain.update(colour="red"), ["unknown key 'colour'"]),
        (lambda plain: plain.update(step="0"), ["ill-typed 'step'", "found '0'", "expected int"]),
        (lambda plain: plain.update(step=True), ["ill-typed 'step'"]),
        (lambda plain: plain.update(kind="tensor"), ["no such kind of line"]),
        (lambda plain: plain.update(kind=["record"]), ["no such kind of line"]),
        (lambda plain: plain.update(phase="lunch"), ["'lunch' is not a valid Phase"]),
        (lambda plain: plain.update(fingerprint="12"), ["16 hexadecimal digits"]),
        (lambda plain: plain.update(shape=[1.5]), ["not a list of integers"]),
        (lambda plain: plain.update(layout={"stride": [1]}), ["missing key"]),
        (lambda plain: plain.update(statistics={}), ["missing key"]),
        (lambda plain: plain.update(seq=9), ["a line is missing or repeated", "found seq 9"]),
    ],
)
def test_a_record_that_is_not_one(crashed, change, words):
    def edit_first_record(lines):
        plain = json.loads(lines[1])
        change(plain)
        return [lines[0], json.dumps(plain) + "\n", *lines[2:]]

    edit(index(crashed), edit_first_record)
    refused(crashed, "index.jsonl:2", *words)


def test_lines_lost_in_the_middle(crashed):
    edit(index(crashed), lambda lines: [*lines[:2], *lines[3:]])
    refused(crashed, "index.jsonl:3", "does not hold what its marker says", "found 1 records")


def test_the_header_is_first_and_ours(crashed):
    edit(index(crashed), lambda lines: lines[1:])
    refused(crashed, "index.jsonl:1", "a header is the first line")
    edit(index(crashed), lambda lines: lines[:0])
    refused(crashed, "no rank of this run wrote anything")


@pytest.mark.parametrize("other", ['"schema":5', '"fingerprint":"crc"', '"sketch":"fft"'])
def test_a_header_of_other_definitions(crashed, other):
    name = other.split(":")[0].strip('"')
    ours = f'"{name}":{json.dumps(json.loads(index(crashed).read_text().splitlines()[0])[name])}'
    edit(index(crashed), lambda lines: [lines[0].replace(ours, other), *lines[1:]])
    refused(crashed, "index.jsonl:1", f"another {name}")


def test_a_directory_of_another_rank(run):
    shutil.copytree(run / "rank00000", run / "rank00001")
    refused(run, "holds another rank", "found rank 0", "expected rank 1")


def test_missing_ranks_are_named_and_unwanted_ones_are_not(tmp_path):
    loaded = load_run(make(tmp_path / "some", ranks=(0, 2), world_size=4))
    assert list(loaded.ranks) == [0, 2]
    assert loaded.notes == ("no records of 2 of 4 ranks: 1, 3",)
    chosen = make(tmp_path / "chosen", ranks=(0, 2), world_size=4, settings={"ranks": "0,2"})
    assert load_run(chosen).notes == ()


def test_a_rank_that_died_before_it_wrote(tmp_path):
    run = make(tmp_path / "run", world_size=2)
    (run / "rank00001").mkdir()
    assert any("rank 1 wrote no record" in note for note in load_run(run).notes)


def read_payload(run):
    rank = load_run(run).ranks[0]
    return rank.payload(rank.records[0])


def payload_refused(run, *words):
    with pytest.raises(DumpError) as caught:
        read_payload(run)
    for word in words:
        assert word in str(caught.value)


def test_payloads_that_are_broken(run):
    path = run / "rank00000" / "step000000.mb000.safetensors"
    whole = path.read_bytes()
    assert read_payload(run).bits.tolist() == [0, 1, 2, 3]
    path.write_bytes(whole[:-3])
    payload_refused(
        run, path.name, "truncated payload", f"found {len(whole) - 3} bytes", f"expected {len(whole)} bytes"
    )
    path.write_bytes(whole + b"?")
    payload_refused(run, path.name, "trailing bytes")
    for cut in (0, 5, 20):
        path.write_bytes(whole[:cut])
        payload_refused(run, path.name, "truncated or no safetensors file", f"{cut} bytes")
    path.write_bytes((2**60).to_bytes(8, "little") + whole[8:])
    payload_refused(run, path.name, "truncated or no safetensors file")
    path.unlink()
    payload_refused(run, path.name, "cannot read")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"0": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, "do not fit the bytes"),
        ({"0": {"dtype": "F31", "shape": [4], "data_offsets": [0, 16]}}, "ill-formed"),
        ({"0": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, "ill-formed"),
        ({"0": {"dtype": "F32", "shape": [4], "data_offsets": []}}, "ill-formed"),
        ({"0": {"dtype": "F32", "shape": [4]}}, "missing key"),
        ({"0": {"dtype": "F32", "shape": [4] + [1] * 99, "data_offsets": [0, 16]}}, "that no tensor has"),
        ({"0": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "leave gaps"),
        ({"1": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "no such tensor"),
        ({"0": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}, "does not fit its record"),
        ({"0": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, "does not fit its record"),
        (["0"], "not a JSON object"),
    ],
)
def test_payload_headers_that_lie(run, header, words):
    head = json.dumps(header).encode()
    path = run / "rank00000" / "step000000.mb000.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(16))
    payload_refused(run, path.name, words)


def test_a_payload_outside_the_rank_is_not_read(crashed):
    edit(
        index(crashed), lambda lines: [line.replace('"step000000.mb', '"../step000000.mb') for line in lines]
    )
    payload_refused(crashed, "not a file of this rank")


@pytest.mark.parametrize("ranks", ["", "2000000000-2100000000", "0-3,1-2,9"])
def test_a_number_of_ranks_that_cannot_be_is_said_at_once(tmp_path, ranks):
    """A damaged manifest speaks of two thousand million ranks; counting them takes minutes."""
    path = tmp_path / "run"
    create_run(path, {"parallel": {"world_size": 1 << 31}, "settings": {"ranks": ranks}})
    RankWriter(path, coordinates=RankCoordinates()).close(complete=False)
    (note,) = [note for note in load_run(path).notes if note.startswith("no records of")]
    count = {"": (1 << 31) - 1, "0-3,1-2,9": 4}.get(ranks, 100_000_001)
    assert note.startswith(f"no records of {count} of {1 << 31} ranks: ")


def test_an_error_repeats_no_file(tmp_path):
    path = tmp_path / "run"
    create_run(path, {})
    (path / "rank00000").mkdir()
    (path / "rank00000" / "index.jsonl").write_text('{"kind": "header", "' + "1" * 100_000 + '": 1}\n')
    with pytest.raises(DumpError) as caught:
        load_run(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "changes",
    [
        {"config": None},
        {"settings": None},
        {"config": {"megatron_args": None, "ddp_config": None, "optimizer_config": None, "schedule": None}},
        {"settings": {"capture": None, "determinism": None}},
        {"settings": {"capture": {"rules": None}}},
    ],
    ids=str,
)
def test_a_section_that_is_null_is_absent(tmp_path, changes):
    run = write_fake_run(tmp_path / "run", steps=1)
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**manifest, **changes}))
    check_run(run)
    compare_runs(run, run)
    assert None not in load_run(run).manifest.get("config", {}).values()


def test_a_line_that_is_too_long_is_not_parsed(monkeypatch):
    line = b'{"kind":"problem","step":0,"message":' + b"[],".join([b"["] * 400)
    monkeypatch.setattr("mindspeed_precision.dump.format.LONGEST_LINE", 1000)
    with pytest.raises(DumpError, match=r"index.jsonl line 3.*so long.*found \d{4} bytes.*1000 at most"):
        parse_line(line, where="index.jsonl line 3")
