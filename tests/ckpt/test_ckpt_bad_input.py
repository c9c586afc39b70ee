"""Every way in which a checkpoint can be broken or hostile: one clear error, and nothing is executed."""

from __future__ import annotations

import json
import pickle
import zipfile

import pytest
from checkpoint_files import megatron_parameters, split_parameters, write_huggingface, write_megatron

from mindspeed_precision.ckpt import open_checkpoint
from mindspeed_precision.ckpt.examine import compare_checkpoints
from mindspeed_precision.cli import main
from mindspeed_precision.errors import CheckpointError, PrecisionError
from mindspeed_precision.torch_archive.opcodes import read_pickle


@pytest.fixture
def huggingface(tmp_path):
    return write_huggingface(tmp_path / "hf", split_parameters())


def refused(path, words):
    with pytest.raises(PrecisionError) as caught:
        read_all(path)
    assert words in str(caught.value), str(caught.value)
    return caught.value


def read_all(path):
    found = open_checkpoint(path)
    for table in (found.tensors, found.loose, *found.states.values()):
        for tensor in table.values():
            tensor.bits()
    return found


def test_the_healthy_one_is_read(huggingface):
    assert len(read_all(huggingface).tensors) == len(split_parameters())


def test_nothing_there(tmp_path):
    refused(tmp_path / "absent", "no such checkpoint")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no checkpoint that is known here (found an empty directory")
    (tmp_path / "void.ckpt").touch()
    refused(tmp_path / "void.ckpt", "the file is empty")


@pytest.mark.torch
def test_what_is_no_state_dict_is_named_in_words(tmp_path):
    torch = pytest.importorskip("torch")
    for number, (value, words) in enumerate(
        [
            (torch.ones(3), "no state dict (found a tensor [3])"),
            ([1], "no state dict (found a list)"),
            (torch.nn.Linear(2, 2), "found an object of the class torch.nn.modules.linear.Linear"),
        ]
    ):
        torch.save(value, tmp_path / f"{number}.pt")
        refused(tmp_path / f"{number}.pt", words)


def test_an_index_that_leads_out_of_the_directory(huggingface, tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(b"")
    index = huggingface / "model.safetensors.index.json"
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused(huggingface, "leads out of the checkpoint")


def test_a_link_that_leads_out_of_the_directory(huggingface, tmp_path):
    file = huggingface / "model-00001-of-00002.safetensors"
    file.rename(tmp_path / "elsewhere.safetensors")
    file.symlink_to(tmp_path / "elsewhere.safetensors")
    refused(huggingface, "leads out of the checkpoint")


def test_the_cache_of_hugging_face_links_to_its_blobs(huggingface, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in huggingface.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert read_all(snapshot).tensors


def test_an_index_of_what_is_not_there(huggingface):
    index = huggingface / "model.safetensors.index.json"
    plain = json.loads(index.read_text())
    plain["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(plain))
    refused(huggingface, "the index names tensors that no file holds")
    plain["weight_map"]["ghost"] = "model-00003-of-00002.safetensors"
    index.write_text(json.dumps(plain))
    refused(huggingface, "No such file")
    index.write_text("[")
    refused(huggingface, "not readable as JSON")


def test_a_file_that_no_index_names_is_said(huggingface, tmp_path):
    extra = huggingface / "model-00009-of-00002.safetensors"
    extra.write_bytes((huggingface / "model-00001-of-00002.safetensors").read_bytes())
    findings = {one.id: one for one in compare_checkpoints(huggingface, huggingface).examination.findings}
    assert (
        "model-00009-of-00002.safetensors: not in the index" in findings["coverage.not_compared"].evidence[0]
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 16]}, "do not fit the bytes"),
        ({"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}, "truncated"),
        ({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}, "ill-formed"),
        ({"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}, "ill-formed"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}, "gaps"),
        ({"dtype": "F32", "shape": [1] * 99 + [4], "data_offsets": [0, 16]}, "a shape that no tensor has"),
        ({"dtype": "F32", "shape": [0, 10**25], "data_offsets": [0, 0]}, "a shape that no tensor has"),
    ],
)
def test_headers_of_safetensors_that_lie(entry, words, tmp_path):
    head = json.dumps({"w": entry}).encode()
    path = tmp_path / "lie.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(16))
    refused(path, words)
    path.write_bytes((10**12).to_bytes(8, "little") + head)
    refused(path, "truncated or no safetensors file")


def archive(path, data, *, storages=None, compression=zipfile.ZIP_STORED, order=b"little"):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/byteorder", order)
        for name, content in (storages or {}).items():
            file.writestr(f"x/data/{name}", content)
    return path


def tensor_pickle(numel, shape, stride, *, offset=0, storage="FloatStorage"):
    """A pickle of ``{"w": tensor}`` written by hand, opcode by opcode."""

    def text(value):
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def number(value):
        raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw

    reference = b"(" + text("storage") + b"ctorch\n" + storage.encode() + b"\n" + text("0") + text("cpu")
    reference += number(numel) + b"tQ"
    sizes = b"(" + b"".join(map(number, shape)) + b"t"
    strides = b"(" + b"".join(map(number, stride)) + b"t"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + reference + number(offset) + sizes + strides
    return b"\x80\x02}" + text("w") + call + b"\x89}tRs."


def test_the_archive_written_by_hand_is_a_good_one(tmp_path):
    path = archive(tmp_path / "good.pt", tensor_pickle(4, (2, 2), (2, 1)), storages={"0": bytes(range(16))})
    assert read_all(path).tensors["w"].bits().shape == (2, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tensor_pickle(10**12, (10**6, 10**6), (10**6, 1)), "a tensor larger than its storage"),
        (tensor_pickle(4, (10**12,), (0,)), "a tensor larger than its storage"),
        (tensor_pickle(4, (4,), (1,), offset=1), "a tensor larger than its storage"),
        (tensor_pickle(4, (2, -2), (2, 1)), "a tensor of negative size"),
        (tensor_pickle(4, (2, 2), (1,)), "an ill-formed tensor"),
        (tensor_pickle(4, (1,) * 100, (1,) * 100), "a shape that no tensor has"),
        (tensor_pickle(4, (0, 10**25), (1, 1)), "a shape that no tensor has"),
    ],
    ids=["10^12 elements", "expanded", "beyond", "negative", "strides", "100 dimensions", "empty"],
)
def test_tensors_that_claim_more_than_there_is(data, words, tmp_path):
    refused(archive(tmp_path / "lie.pt", data, storages={"0": bytes(16)}), words)


def test_a_storage_that_is_not_there(tmp_path):
    refused(archive(tmp_path / "a.pt", tensor_pickle(4, (4,), (1,))), "without a part that it names")


def test_zip_bombs_and_other_orders(tmp_path):
    bomb = archive(
        tmp_path / "bomb.pt",
        tensor_pickle(1 << 24, (1 << 24,), (1,)),
        storages={"0": bytes(1 << 26)},
        compression=zipfile.ZIP_DEFLATED,
    )
    assert bomb.stat().st_size < 1 << 20
    refused(bomb, "a compressed or encrypted entry")
    refused(archive(tmp_path / "big.pt", tensor_pickle(4, (4,), (1,)), order=b"big"), "big-endian")


def test_other_zip_files_and_old_pickles(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as file:
        file.writestr("readme.txt", "no checkpoint")
    refused(tmp_path / "other.pt", "none of torch.save")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    refused(tmp_path / "old.pt", "before 1.6")
    (tmp_path / "text.pt").write_text("hello, this is no checkpoint at all")
    refused(tmp_path / "text.pt", "no checkpoint of MindSpore")


def hostile(protocol):
    class Attack:
        def __reduce__(self):
            return print, ("EXECUTED",)

    return pickle.dumps({"w": Attack()}, protocol=protocol)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_a_pickle_would_call_is_never_called(protocol, capsys, tmp_path):
    found = read_pickle(hostile(protocol), where="here")
    assert str(found["w"].of).endswith(".print")
    assert found["w"].args == ("EXECUTED",)
    refused(archive(tmp_path / "attack.pt", hostile(protocol)), "no tensors by name")
    assert "EXECUTED" not in capsys.readouterr().out


def test_pickles_that_refer_to_themselves_or_are_too_deep():
    loop: list = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="refers to itself"):
        read_pickle(pickle.dumps(loop), where="here")
    deep: list = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(CheckpointError, match="too deep"):
        read_pickle(pickle.dumps(deep), where="here")
    with pytest.raises(CheckpointError, match="too deep"):
        read_pickle(b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".", where="here")


def test_pickles_that_unfold_to_billions():
    laughs = ["ha"] * 10
    for _ in range(12):
        laughs = [laughs] * 10
    data = pickle.dumps(laughs)
    assert len(data) < 1000
    with pytest.raises(CheckpointError, match="too large"):
        read_pickle(data, where="here")
    shared = ["ha"] * 10
    assert read_pickle(pickle.dumps([shared, shared]), where="here") == [shared, shared]


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"\x80\x02", b"\x80\x02(", b"\x80\x02tR.", b"\x80\x02}q", b"\xff\xff", b"\x80\x02h\x07."],
)
def test_damaged_pickles(data):
    with pytest.raises(CheckpointError, match="damaged pickle"):
        read_pickle(data, where="here")


def test_what_pickle_writes_is_read_as_it_is():
    value = {"a": [1, -2, 2**70, 0.5, None, True], "b": ("x", b"y", {"z"}, frozenset({1})), 3: {"n": {}}}
    for protocol in range(2, 6):
        assert read_pickle(pickle.dumps(value, protocol), where="here") == value


@pytest.mark.torch
def test_ranks_of_megatron_that_are_missing(tmp_path):
    where = write_megatron(tmp_path / "mg", megatron_parameters(split_parameters()), tp=2, pp=2)
    read_all(where)
    gone = where / "iter_0000007" / "mp_rank_01_000"
    (gone / "model_optim_rng.pt").unlink()
    refused(where, "a rank without its file")
    gone.rmdir()
    (where / "iter_0000007" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    (where / "iter_0000007" / "mp_rank_01_001").rmdir()
    refused(where, "files of tp ranks are missing")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "words"), [("../../etc", "no iteration"), ("12\nmore", "no iteration"), ("9", "is not there")]
)
def test_trackers_that_lead_nowhere(text, words, tmp_path):
    where = write_megatron(tmp_path / "mg", megatron_parameters(split_parameters()))
    (where / "latest_checkpointed_iteration.txt").write_text(text)
    refused(where, words)


def test_a_small_file_of_mindspore_that_claims_much(tmp_path):
    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    dims = b"\x08" + b"\x80\xa0\x94\xa5\x8d\x1d"  # 10^12
    tensor = dims + field(2, b"Float32") + field(3, bytes(16))
    path = tmp_path / "lie.ckpt"
    path.write_bytes(field(1, field(1, b"w") + field(2, tensor)))
    refused(path, "a parameter that has not the bytes of its shape")
    tensor = b"\x08\x01" * 40 + field(2, b"Float32") + field(3, bytes(4))
    path.write_bytes(field(1, field(1, b"w") + field(2, tensor)))
    refused(path, "a shape that no tensor has")


def test_bad_input_is_exit_status_2_and_one_line(tmp_path, capsys):
    assert main(["ckpt", str(tmp_path), str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("mindspeed-precision: ")


def test_a_mapping_that_speaks_of_neither(huggingface, tmp_path):
    file = tmp_path / "names.yaml"
    file.write_text("schema: 1\nside: nobody\n")
    with pytest.raises(CheckpointError, match="must speak of one"):
        compare_checkpoints(huggingface, huggingface, mapping=[file])


def test_two_tensors_that_become_one(huggingface, tmp_path):
    file = tmp_path / "names.yaml"
    file.write_text("schema: 1\nside: candidate\nnames:\n  - {from: model.norm, to: lm_head}\n")
    with pytest.raises(CheckpointError, match="two tensors become one parameter"):
        compare_checkpoints(huggingface, huggingface, mapping=[file])
