"""What is written is read back equal."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.format import (
    Header,
    Parameters,
    PlaceDeclaration,
    Problem,
    StepMarker,
    parse_line,
    payload_file,
    to_json,
)
from mindspeed_precision.dump.payload import PayloadFile, write_payload
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run, update_manifest
from mindspeed_precision.errors import DumpError
from mindspeed_precision.record.sketch import pack
from mindspeed_precision.records import (
    INIT_STEP,
    NO_MICROBATCH,
    Digest,
    Layout,
    ParameterDeclaration,
    Phase,
    Placement,
    RankCoordinates,
    RecordKey,
    Role,
    Split,
    Statistics,
    TensorRecord,
    Unplaced,
)

texts = st.text(max_size=12)
counts = st.integers(0, 2**62)
numbers = st.floats(allow_nan=False)
hashes = st.integers(0, 2**64 - 1)
shapes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
statistics = st.builds(
    Statistics,
    minimum=numbers,
    maximum=numbers,
    mean=numbers,
    l2_norm=numbers,
    zeros=counts,
    nans=counts,
    infs=counts,
    exponents=st.dictionaries(st.integers(0, 255), counts, max_size=4),
)
keys = st.builds(
    RecordKey,
    step=st.integers(-1, 2**40),
    microbatch=st.integers(-1, 2**20),
    phase=st.sampled_from(Phase),
    fqn=texts,
    role=st.sampled_from(Role),
    slot=texts,
    occurrence=counts,
    recomputed=st.booleans(),
)
layouts = st.builds(
    Layout, stride=shapes, storage_offset=counts, contiguous=st.booleans(), format=st.sampled_from(["", "ND"])
)
sketches = st.builds(
    lambda seed, roundoff: pack(np.random.default_rng(seed).normal(size=256) * 10.0**seed, roundoff=roundoff),
    st.integers(0, 300),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
records = st.builds(
    TensorRecord,
    seq=counts,
    key=keys,
    shape=shapes,
    dtype=texts,
    layout=st.none() | layouts,
    digest=st.builds(
        Digest,
        fingerprint=hashes,
        unordered=hashes,
        statistics=st.none() | statistics,
        sketch=st.none() | sketches,
    ),
    payload=st.none() | texts,
    note=texts,
    part=st.none() | st.tuples(st.integers(0, 2**40), st.integers(2**40, 2**60)),
)


@st.composite
def placements(draw):
    """What is whole, or split into one or two blocks along some of its dimensions."""
    shape = draw(st.lists(st.integers(2, 2**20), min_size=1, max_size=3).map(tuple))
    kinds = [draw(st.sampled_from([(), ((0, 1),), ((1, size - 1), (0, 1))])) for size in shape]
    splits = tuple(Split(dim=dim, blocks=blocks) for dim, blocks in enumerate(kinds) if blocks)
    return Placement(shape=shape, splits=splits, partial=draw(texts), copy_of=draw(texts))


@st.composite
def declarations(draw):
    """Parameters of known and of unknown placement."""
    placement = draw(placements())
    known = draw(st.booleans())
    return ParameterDeclaration(
        fqn=draw(texts),
        shape=placement.local_shape if known else draw(shapes),
        dtype=draw(texts),
        trainable=draw(st.booleans()),
        tied_to=draw(texts),
        placement=placement if known else None,
    )


parameters = declarations()
reasons = st.builds(Unplaced, reason=st.text(min_size=1, max_size=12))
lines = st.one_of(
    records,
    st.builds(Header, coordinates=st.builds(RankCoordinates, rank=counts, world_size=counts, tp_rank=counts)),
    st.builds(Parameters, parameters=st.lists(parameters, max_size=3).map(tuple)),
    st.builds(PlaceDeclaration, number=counts, place=st.one_of(placements(), reasons)),
    st.builds(Problem, step=counts, record=texts, reason=texts),
    st.builds(StepMarker, step=counts, records=counts, payloads=counts, problems=counts, microbatches=counts),
)


@settings(deadline=None)
@given(lines)
def test_every_line_survives(line):
    text = to_json(line)
    assert "\n" not in text
    assert text.isascii()
    assert parse_line(text, where="here") == line


def test_activations_are_placed_once(tmp_path):
    """Each place is declared before the first record that has it, and every record gets its own back."""
    halves = [Placement(shape=(4, 2), splits=(Split(dim=0, blocks=((n, 2),)),)) for n in (0, 2)]
    told = [halves[0], None, Unplaced(reason="no layout rule"), halves[1], halves[0]]
    create_run(tmp_path / "run", {})
    writer = RankWriter(tmp_path / "run", coordinates=RankCoordinates())
    digest = Digest(fingerprint=1, unordered=2)
    for step, places in enumerate((told, told[::-1])):
        keys = [RecordKey(step=step, phase=Phase.FPROP, fqn=f"m{n}", role=Role.INPUT) for n in range(5)]
        written = [
            TensorRecord(
                seq=5 * step + n,
                key=key,
                shape=(2, 2),
                dtype="float32",
                layout=None,
                digest=digest,
                place=place,
            )
            for n, (key, place) in enumerate(zip(keys, places, strict=True))
        ]
        writer.write_step(step, written, {}, microbatches=1)
    writer.close(complete=True)
    assert [record.place for record in load_run(tmp_path / "run").ranks[0].records] == [*told, *told[::-1]]
    index = (tmp_path / "run" / "rank00000" / "index.jsonl").read_text()
    assert index.count('"kind":"placement"') == 3


def test_nan_survives_as_text():
    moments = Statistics(
        minimum=math.nan, maximum=math.inf, mean=-math.inf, l2_norm=0.1, zeros=0, nans=1, infs=2
    )
    digest = Digest(fingerprint=1, unordered=2, statistics=moments)
    key = RecordKey(step=0, phase=Phase.LOSS, fqn="loss", role=Role.LOSS)
    text = to_json(TensorRecord(seq=0, key=key, shape=(), dtype="float32", layout=None, digest=digest))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    found = parse_line(text, where="here").digest.statistics
    assert math.isnan(found.minimum)
    assert (found.maximum, found.mean, found.l2_norm) == (math.inf, -math.inf, 0.1)


HOSTS = [
    ("bfloat16", np.uint16, (2, 3)),
    ("float8_e4m3fn", np.uint8, (5,)),
    ("float8_e5m2", np.uint8, (1, 1)),
    ("float8_e8m0fnu", np.uint8, (4,)),
    ("float32", np.uint32, ()),
    ("float64", np.uint64, (0, 3)),
    ("complex64", np.uint32, (2, 2, 2)),
    ("bool", np.uint8, (3,)),
    ("int64", np.uint64, (2,)),
    ("uint16", np.uint16, (3,)),
]


def hosts():
    generator = np.random.default_rng(0)
    return {
        str(seq): HostTensor(bits=generator.integers(0, 2, shape).astype(bits), dtype=dtype)
        for seq, (dtype, bits, shape) in enumerate(HOSTS)
    }


def logical_shape(host):
    return host.bits.shape[:-1] if host.dtype.startswith("complex") else host.bits.shape


def test_payloads_of_every_type(tmp_path):
    path = tmp_path / "p.safetensors"
    written = hosts()
    write_payload(path, written)
    file = PayloadFile(path)
    for name, host in written.items():
        found = file.read(name, dtype=host.dtype, shape=logical_shape(host))
        assert found.dtype == host.dtype
        assert found.bits.dtype == host.bits.dtype
        np.testing.assert_array_equal(found.bits, host.bits)
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.safetensors"]


@pytest.mark.torch
def test_the_safetensors_library_reads_what_we_write(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    path = tmp_path / "p.safetensors"
    written = hosts()
    write_payload(path, written)
    loaded = load_file(path)
    assert loaded.keys() == written.keys()
    for name, host in written.items():
        views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = loaded[name].view(views[host.bits.itemsize]).numpy().view(host.bits.dtype)
        np.testing.assert_array_equal(bits, host.bits)
    assert loaded["0"].dtype == torch.bfloat16
    assert loaded["1"].dtype == torch.float8_e4m3fn


def record(seq, step, *, microbatch=NO_MICROBATCH, shape=(2,), dtype="bfloat16"):
    key = RecordKey(step=step, microbatch=microbatch, phase=Phase.FPROP, fqn="layer", role=Role.OUTPUT)
    digest = Digest(fingerprint=seq, unordered=seq)
    return TensorRecord(seq=seq, key=key, shape=shape, dtype=dtype, layout=None, digest=digest)


def host(seq):
    return HostTensor(bits=np.array([seq, 7], np.uint16), dtype="bfloat16")


def test_a_run_survives(tmp_path):
    run = tmp_path / "new" / "run"
    create_run(
        run, {"label": "", "parallel": {"world_size": 2}, "config": {"clip": math.inf, "beta": (0.9, 0.95)}}
    )
    update_manifest(run, {"label": "done"})
    declared = ParameterDeclaration(fqn="layer.weight", shape=(2,), dtype="bfloat16", trainable=True)
    for rank in (0, 1):
        writer = RankWriter(
            run, coordinates=RankCoordinates(rank=rank, world_size=2, tp_rank=rank, tp_size=2)
        )
        writer.declare_parameters([declared])
        first = [record(0, INIT_STEP), record(1, INIT_STEP)]
        writer.write_step(INIT_STEP, first, {1: host(1)}, microbatches=0)
        second = [record(seq, 0, microbatch=seq % 2) for seq in (2, 3, 4)]
        writer.write_step(0, second, {seq: host(seq) for seq in (2, 3, 4)}, microbatches=2)
        writer.write_step(1, [], {}, microbatches=2)
        writer.close(complete=True)
        writer.close(complete=False)
    loaded = load_run(run)
    assert loaded.notes == ()
    assert loaded.manifest["schema"] == 4
    assert loaded.manifest["label"] == "done"
    assert loaded.manifest["config"] == {"clip": "inf", "beta": [0.9, 0.95]}
    assert list(loaded.ranks) == [0, 1]
    rank = loaded.ranks[1]
    assert rank.coordinates == RankCoordinates(rank=1, world_size=2, tp_rank=1, tp_size=2)
    assert rank.parameters == (declared,)
    assert (rank.steps, rank.microbatches) == ((INIT_STEP, 0, 1), {INIT_STEP: 0, 0: 2, 1: 2})
    assert [found.payload for found in rank.records] == [
        None,
        "init.safetensors",
        "step000000.mb000.safetensors",
        "step000000.mb001.safetensors",
        "step000000.mb000.safetensors",
    ]
    assert rank.payload(rank.records[4]).bits.tolist() == [4, 7]


def test_a_step_that_runs_twice_keeps_both(tmp_path):
    create_run(tmp_path, {})
    writer = RankWriter(tmp_path, coordinates=RankCoordinates())
    for seq in (0, 1):
        writer.write_step(5, [record(seq, 5)], {seq: host(seq)}, microbatches=1)
    writer.close(complete=True)
    loaded = load_run(tmp_path)
    rank = loaded.ranks[0]
    assert [rank.payload(found).bits.tolist() for found in rank.records] == [[0, 7], [1, 7]]
    assert any("step 5 was run more than once" in note for note in loaded.notes)


def test_file_names():
    assert payload_file(10, 0) == "step000010.mb000.safetensors"
    assert payload_file(10, NO_MICROBATCH) == "step000010.safetensors"
    assert payload_file(INIT_STEP, NO_MICROBATCH, 2) == "init.r2.safetensors"


def test_nothing_is_lost(tmp_path):
    create_run(tmp_path / "run", {})
    with pytest.raises(DumpError, match="not empty"):
        create_run(tmp_path / "run", {})
    RankWriter(tmp_path / "run", coordinates=RankCoordinates())
    with pytest.raises(DumpError, match="already written"):
        RankWriter(tmp_path / "run", coordinates=RankCoordinates())
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="cannot make"):
        create_run(tmp_path / "file", {})


def test_a_manifest_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(DumpError, match="cannot be written as JSON"):
        create_run(tmp_path / "run", {"dtype": object()})
    with pytest.raises(DumpError, match="no manifest"):
        update_manifest(tmp_path / "absent", {})


class FullDisk:
    """Takes some bytes, then refuses, as a disk does that fills up."""

    closed = False

    def __init__(self, file):
        self.file = file

    def write(self, data):
        self.file.write(bytes(data)[:50])
        refuse(data)

    def close(self):
        self.file.close()


def refuse(_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["index", "payload"])
def test_a_full_disk_is_one_clear_error_and_nothing_follows_it(tmp_path, monkeypatch, where):
    create_run(tmp_path, {})
    writer = RankWriter(tmp_path, coordinates=RankCoordinates())
    writer.write_step(0, [record(0, 0)], {0: host(0)}, microbatches=1)
    with monkeypatch.context() as patched:
        if where == "index":
            patched.setattr(writer, "_file", FullDisk(writer._file))
        else:
            patched.setattr("mindspeed_precision.dump.whole_file.os.fsync", refuse)
        with pytest.raises(DumpError, match="No space left on device"):
            writer.write_step(1, [record(1, 1)], {1: host(1)}, microbatches=1)
    with pytest.raises(DumpError, match="earlier step could not be written"):
        writer.write_step(2, [record(1, 2)], {}, microbatches=1)
    with pytest.raises(DumpError, match="earlier step could not be written"):
        writer.close(complete=True)
    loaded = load_run(tmp_path)
    assert loaded.ranks[0].steps == (0,)
    assert not loaded.ranks[0].complete
    assert any("did not end as planned" in note for note in loaded.notes)
