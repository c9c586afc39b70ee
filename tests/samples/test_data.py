"""What a training reads, from each source, alone and beside another; and how two sides differ, told apart."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision import load_run
from mindspeed_precision.cli import main
from mindspeed_precision.errors import ConfigError, DumpError, PrecisionError
from mindspeed_precision.records import Level
from mindspeed_precision.samples import load_decoder, look, open_source
from mindspeed_precision.samples.indexed import MAGIC, open_indexed
from mindspeed_precision.samples.tokens import ByteDecoder
from mindspeed_precision.testing.fake_runs import plant, write_fake_run

ROOT = Path(__file__).parents[2]
KEPT = {"level": Level.TENSOR}


def ids(seen):
    return [finding.id for finding in seen.examination().findings]


def write_lines(path, samples):
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def sequences(count=6, length=8, seed=3):
    drawn = np.random.default_rng(seed).integers(1, 200, (count, length))
    return [{"tokens": row[:-1].tolist(), "labels": row[1:].tolist()} for row in drawn]


def write_indexed(prefix, rows, code=4, dtype="<i4"):
    arrays = [np.asarray(row, dtype=dtype) for row in rows]
    lengths = np.asarray([len(one) for one in arrays], dtype="<i4")
    starts = np.cumsum([0, *[one.nbytes for one in arrays]])[:-1].astype("<i8")
    bounds = np.arange(len(arrays) + 1, dtype="<i8")
    prefix.with_suffix(".bin").write_bytes(b"".join(one.tobytes() for one in arrays))
    header = struct.pack("<9sQBQQ", MAGIC, 1, code, len(arrays), len(bounds))
    index = header + lengths.tobytes() + starts.tobytes() + bounds.tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix


# --- sources


def test_a_recorded_run_shows_what_the_model_got(tmp_path):
    run = write_fake_run(tmp_path / "run", **KEPT)
    source = open_source(run, count=3)
    assert source.kind == "a recorded run"
    assert [sample.place for sample in source.samples] == [
        "step 0, microbatch 0, data-parallel rank 0",
        "step 0, microbatch 1, data-parallel rank 0",
        "step 1, microbatch 0, data-parallel rank 0",
    ]
    tokens = source.samples[0].slots["tokens"]
    records = load_run(run).ranks[0]
    record = next(r for r in records.records if r.key.slot == "tokens")
    assert tokens.tolist() == records.payload(record).bits.view(np.int64).tolist()
    assert open_source(run, count=3, step=1).samples[0].place.startswith("step 1, ")


def test_a_run_without_elements_says_what_to_record(tmp_path, capsys):
    run = write_fake_run(tmp_path / "run")
    assert main(["data", str(run)]) == 2
    told = capsys.readouterr()
    out = " ".join(told.out.split())  # it is wrapped
    assert "the elements of 4 of 4 batches were not kept" in out
    assert "--precision-debug-set capture.rules=[{phase: batch, level: tensor}]" in out
    assert "there is no sample whose elements were kept" in told.err


def test_an_indexed_data_set_is_read_without_megatron(tmp_path):
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    prefix = write_indexed(tmp_path / "text_document", rows)
    source = open_source(prefix, count=5)
    assert [sample.slots["tokens"].tolist() for sample in source.samples] == rows
    assert source.kind == "a Megatron data set (3 sequences of int32)"
    by_file = open_source(tmp_path / "text_document.idx", count=1)
    assert by_file.samples[0].slots["tokens"].tolist() == [1, 2, 3]


def test_the_stream_is_cut_as_a_model_reads_it(tmp_path):
    prefix = write_indexed(tmp_path / "d", [[1, 2, 3], [4, 5], [6, 7, 8, 9]], code=8, dtype="<u2")
    samples = open_source(prefix, count=5, seq_length=4).samples
    assert [(s.slots["tokens"].tolist(), s.slots["labels"].tolist()) for s in samples] == [
        ([1, 2, 3, 4], [2, 3, 4, 5]),
        ([5, 6, 7, 8], [6, 7, 8, 9]),
    ]


@pytest.mark.torch
@pytest.mark.megatron
def test_what_megatron_writes_is_what_we_read(tmp_path, megatron):
    script = """
import sys, numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
builder = IndexedDatasetBuilder(sys.argv[1] + ".bin", dtype=numpy.uint16)
for row in ([7, 8, 9], [1, 65535]):
    builder.add_item(torch.tensor(row)); builder.end_document()
builder.finalize(sys.argv[1] + ".idx")
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{megatron('0.17.1')}"}
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "m")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    found = open_indexed(tmp_path / "m")
    assert [found.sequence(n).tolist() for n in range(len(found))] == [[7, 8, 9], [1, 65535]]
    assert found.documents.tolist() == [0, 1, 2]


def test_jsonl_with_numbers_and_with_text(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"tokens": [1, 2], "loss_mask": [1.0, 0.0]}, {"text": "hé"}])
    one, two = open_source(path, count=9).samples
    assert one.slots["tokens"].tolist() == [1, 2]
    assert bytes(two.slots["text"]).decode() == "hé"
    cut = open_source(path, count=9, decoder=ByteDecoder()).samples[1]
    assert cut.slots["tokens"].tolist() == list("hé".encode())


# --- how two sides differ


def test_equal_sides_are_calm(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", sequences())
    assert main(["data", str(path), str(path), "--samples", "6"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("6 samples of JSONL. The two sides are the same in what was compared.\n")
    assert "candidate" not in out


def changed(kind, samples):
    if kind == "order":
        return [samples[1], samples[0], *samples[2:]]
    if kind == "shift":
        return [*samples[1:], {"tokens": [9] * 7, "labels": [9] * 7}]
    if kind == "labels":
        return [{**sample, "labels": sample["tokens"]} for sample in samples]
    if kind == "mask":
        return [{**sample, "loss_mask": [1.0] * 6 + [0.0]} for sample in samples]
    if kind == "padding":
        return [{**s, "tokens": [*s["tokens"][:-2], 0, 0]} for s in samples]
    if kind == "tokenizer":
        return [{**s, "tokens": [one * 7 + 1 for one in s["tokens"]]} for s in samples]
    return [{**s, "tokens": [s["tokens"][0], 7, *s["tokens"][2:]]} for s in samples]


@pytest.mark.parametrize(
    ("kind", "id_"),
    [
        ("order", "data.batch_order"),
        ("shift", "data.shifted"),
        ("labels", "data.shifted"),
        ("mask", "data.other_mask"),
        ("padding", "data.other_padding"),
        ("tokenizer", "data.other_tokenizer"),
        ("content", "data.batch_differs"),
    ],
)
def test_each_way_to_differ_is_told_apart(tmp_path, kind, id_):
    samples = [{**sample, "loss_mask": [1.0] * 7} for sample in sequences()]
    if kind == "padding":  # what stood there is padding, too: another id
        samples = [{**s, "tokens": [*s["tokens"][:-2], 5, 5]} for s in samples]
    one = write_lines(tmp_path / "a.jsonl", samples)
    two = write_lines(tmp_path / "b.jsonl", changed(kind, samples))
    assert ids(look(one, two, count=6)) == [id_]


def test_two_runs_are_compared_in_all_their_batches_without_elements(tmp_path):
    one = write_fake_run(tmp_path / "a")
    two = write_fake_run(tmp_path / "b", seed=2)
    seen = look(one, two)
    assert ids(seen)[0].startswith("data.")
    assert seen.answer.exercised == 4
    assert ids(look(one, write_fake_run(tmp_path / "c"))) == []


def test_a_run_beside_the_data_set_that_it_should_have_read(tmp_path):
    run = write_fake_run(tmp_path / "run", **KEPT)
    samples = [
        {name: sample.slots[name].tolist() for name in ("tokens", "labels")}
        for sample in open_source(run, count=4).samples
    ]
    same = write_lines(tmp_path / "same.jsonl", samples)
    other = write_lines(tmp_path / "other.jsonl", [samples[2], *samples[1:]])
    assert ids(look(run, same)) == []
    assert ids(look(run, other)) == ["data.batch_order"]


def test_nothing_in_common_is_no_answer(tmp_path, capsys):
    one = write_lines(tmp_path / "a.jsonl", [{"tokens": [1, 2]}])
    two = write_lines(tmp_path / "b.jsonl", [{"text": "x"}])
    assert main(["data", str(one), str(two)]) == 2
    assert "no tensor is in both: ['tokens'] in the one, ['text'] in the other" in capsys.readouterr().err


# --- what is shown


def test_differences_are_marked_and_decoded(tmp_path, capsys):
    one = write_lines(tmp_path / "a.jsonl", [{"tokens": list(b"the cat sat on the mat today")}])
    two = write_lines(tmp_path / "b.jsonl", [{"tokens": list(b"the cat sat on the rat today")}])
    assert main(["data", str(one), str(two), "--tokenizer", "bytes"]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "tokens  baseline   … 32 116 104 101 32 [109] 97 116 32 116 111 100 … (28)" in lines
    assert 'tokens             …" the mat today"' in lines
    assert "tokens  candidate  … 32 116 104 101 32 [114] 97 116 32 116 111 100 … (28)" in lines
    assert "tokens             1 of 28 differs, first at 19" in lines


def test_a_side_that_has_fewer_samples_is_said(tmp_path):
    one = write_lines(tmp_path / "a.jsonl", sequences(3))
    two = write_lines(tmp_path / "b.jsonl", sequences(2))
    tables = look(one, two).examination().tables
    assert tables["sample 2"][0] == "baseline: line 3, sample 2; candidate: no more samples"


def test_json_has_every_number(tmp_path, capsys):
    rows = sequences(1, length=40)
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert main(["data", str(path), str(path), "--json", "--tokenizer", "bytes"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["differ"] == []
    assert sample["baseline"]["slots"]["tokens"] == rows[0]["tokens"]
    assert sample["candidate"]["text"]["tokens"] == ByteDecoder().text(rows[0]["tokens"])


def test_a_mask_of_two_dimensions_is_counted_not_printed(tmp_path):
    run = write_fake_run(tmp_path / "run", **KEPT)
    seen = look(run)
    (side,) = seen.sides
    mask = np.tril(np.ones((6, 6), dtype=bool))[None]
    sample = replace(side.samples[0], slots={**side.samples[0].slots, "attention_mask": mask})
    shown = replace(seen, sides=(replace(side, samples=(sample,)),)).examination().tables["sample 0"]
    assert "attention_mask  [1x6x6] 21 of 36 not zero" in shown


# --- tokenizers


def test_a_vocabulary_is_enough_to_decode(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"Ġthe": 0, "Ġcat": 1, "s": 2}))
    decoder = load_decoder(str(tmp_path))
    assert decoder.text([0, 1, 2, 9]) == " the cats<9>"
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    assert load_decoder(str(tmp_path / "vocab.txt")).text([1, 0]) == "ba"
    path = write_lines(tmp_path / "a.jsonl", [{"text": "the cat"}])
    notes = look(path, tokenizer=str(tmp_path / "vocab.json")).examination().notes
    assert any("can only decode" in note for note in notes)


def test_a_tokenizer_of_hugging_face(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "the": 1, "cat": 2}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.save(str(tmp_path / "tokenizer.json"))
    decoder = load_decoder(str(tmp_path))
    assert decoder.ids("the cat") == [1, 2]
    assert decoder.text([1, 2, 77]) == "the cat<77>"


def test_without_the_library_the_pip_line_is_said(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PrecisionError, match=r"pip install 'mindspeed-precision\[tokenizers\]'"):
        load_decoder(str(tmp_path))


# --- bad input


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("vocab.json", "[1]", "neither a tokenizer.json nor a vocabulary"),
        ("vocab.json", "{", "not readable as JSON"),
        ("readme.md", "x", "no tokenizer in this directory"),
    ],
)
def test_a_bad_tokenizer_is_one_error(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        load_decoder(str(tmp_path))


@pytest.mark.parametrize(
    ("lines", "said"),
    [("{", "not readable as JSON"), ("[1]", "not an object"), ('{"a": "b"}', "no sample in this line")],
)
def test_a_bad_line_is_one_error_with_its_place(tmp_path, capsys, lines, said):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' + lines + "\n")
    assert main(["data", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert f"{path}:2" in err
    assert err.count("\n") == 1


def broken(prefix, kind):
    index = prefix.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    if kind == "magic":
        data[:4] = b"XXXX"
    elif kind == "version":
        data[9] = 2
    elif kind == "claims":  # 10^12 sequences
        data[18:26] = struct.pack("<Q", 10**12)
    elif kind == "outside":
        data[34:38] = struct.pack("<i", 10**6)
    elif kind == "negative":
        data[34:38] = struct.pack("<i", -1)
    elif kind == "overflow":
        data[46:54] = struct.pack("<q", 2**63 - 1)
    elif kind == "short":
        data = data[:20]
    index.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("magic", "no index of a Megatron data set"),
        ("short", "no index of a Megatron data set"),
        ("version", "an index of another format"),
        ("claims", "does not hold what its header says"),
        ("outside", "lies outside the data"),
        ("negative", "lies outside the data"),
        ("overflow", "lies outside the data"),
    ],
)
def test_a_broken_index_is_one_error_before_anything_is_allocated(tmp_path, kind, said):
    prefix = write_indexed(tmp_path / "d", [[1, 2], [3], [4]])
    broken(prefix, kind)
    with pytest.raises(DumpError, match=said):
        open_indexed(prefix)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent"], "no data that can be read"),
        (["a.jsonl", "--samples", "0"], "no number of samples"),
        (["a.jsonl", "--step", "1"], "only runs have steps"),
    ],
)
def test_what_does_not_fit_is_one_error(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    assert main(["data", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_step_that_was_not_recorded_is_said(tmp_path):
    run = write_fake_run(tmp_path / "run", plants=[plant()], **KEPT)
    with pytest.raises(DumpError, match="this step was not recorded"):
        open_source(run, count=1, step=7)


def test_batches_without_elements_are_compared_and_said_so(tmp_path, capsys):
    one, two = (str(write_fake_run(tmp_path / name)) for name in ("one", "two"))
    assert main(["data", one, two]) == 0
    said = capsys.readouterr().out
    assert said.startswith("The batches of both sides are the same (")
    assert "No sample is shown: their elements were not kept." in " ".join(said.split())
    assert main(["data", one]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("NO ANSWER: no sample could be shown")
    assert "no sample whose elements were kept" in err
