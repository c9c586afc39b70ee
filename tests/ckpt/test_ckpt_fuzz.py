"""Truncated and flipped files of every format: they are read, or refused by one clear error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_files import hosts, megatron_parameters, split_parameters, write_huggingface, write_megatron
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_precision.ckpt import open_checkpoint
from mindspeed_precision.ckpt.examine import compare_checkpoints
from mindspeed_precision.dump.payload import write_payload
from mindspeed_precision.errors import PrecisionError

GOLDEN = Path(__file__).parent / "golden" / "mindspore_2_10.ckpt"
FUZZ = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEWER = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
COMPARED = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def damages(draw):
    """A cut, or some bytes that are other bytes; places as parts of the length."""
    cut = draw(st.one_of(st.none(), st.floats(0, 1)))
    place = st.one_of(st.floats(0, 1), st.floats(0, 0.02), st.floats(0.98, 1))
    return cut, draw(st.lists(st.tuples(place, st.integers(0, 255)), min_size=cut is None, max_size=6))


def damaged(data, damage):
    cut, flips = damage
    found = bytearray(data if cut is None else data[: int(cut * len(data))])
    for place, value in flips:
        if found:
            found[min(int(place * len(found)), len(found) - 1)] ^= value or 1
    return bytes(found)


def read_or_refuse(path):
    told = "read"
    try:
        found = open_checkpoint(path)
        for table in (found.tensors, found.loose, *found.states.values()):
            for tensor in table.values():
                tensor.bits()
    except PrecisionError as error:
        told = str(error)
    assert told.strip()
    assert "\n" not in told


def compare_or_refuse(one, two):
    told = "compared"
    try:
        compare_checkpoints(one, two)
    except PrecisionError as error:
        told = str(error)
    assert told.strip()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def safetensors_file(places):
    values = {"w": split_parameters()["model.norm.weight"], "a.b": split_parameters()["lm_head.weight"]}
    write_payload(places / "good.safetensors", hosts(values))
    return (places / "good.safetensors").read_bytes()


@FUZZ
@given(damage=damages())
def test_safetensors(damage, safetensors_file, places):
    path = places / "bad.safetensors"
    path.write_bytes(damaged(safetensors_file, damage))
    read_or_refuse(path)


@FUZZ
@given(damage=damages())
def test_mindspore(damage, places):
    path = places / "bad.ckpt"
    path.write_bytes(damaged(GOLDEN.read_bytes(), damage))
    read_or_refuse(path)


@pytest.fixture(scope="module")
def index_of(places):
    return write_huggingface(places / "hf", split_parameters())


@FEWER
@given(damage=damages(), name=st.sampled_from(["model.safetensors.index.json", "config.json"]))
def test_indexes(damage, name, index_of, places):
    mine = places / "hf_bad"
    shutil.rmtree(mine, ignore_errors=True)
    shutil.copytree(index_of, mine)
    (mine / name).write_bytes(damaged((index_of / name).read_bytes(), damage))
    read_or_refuse(mine)


@pytest.fixture(scope="module")
def megatron_file(places):
    where = write_megatron(places / "mg", megatron_parameters(split_parameters()))
    return next(where.rglob("model_optim_rng.pt"))


@pytest.mark.torch
@FUZZ
@given(damage=damages())
def test_megatron(damage, megatron_file, places):
    path = places / "mg_bad" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(damaged(megatron_file.read_bytes(), damage))
    read_or_refuse(path.parent.parent)


@pytest.mark.torch
@COMPARED
@given(damage=damages())
def test_comparing_what_is_damaged(damage, megatron_file, places):
    path = places / "mg_compared" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(damaged(megatron_file.read_bytes(), damage))
    compare_or_refuse(megatron_file.parent.parent, path.parent.parent)


@pytest.fixture(scope="module")
def distributed(places):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    state = {
        "a.weight": torch.arange(24.0).reshape(4, 6),
        "b": {"c": torch.ones(3, dtype=torch.bfloat16)},
        "n": 3,
    }
    dcp.save(state, checkpoint_id=places / "dcp", no_dist=True)
    return places / "dcp"


@pytest.mark.torch
def test_what_torch_itself_distributes_is_read(distributed):
    found = open_checkpoint(distributed)
    assert {name: (one.shape, one.dtype) for name, one in found.tensors.items()} == {
        "a.weight": ((4, 6), "float32"),
        "b.c": ((3,), "bfloat16"),
    }
    assert found.tensors["a.weight"].bits().view("<f4")[1, 2] == 8


@pytest.mark.torch
@FEWER
@given(damage=damages(), name=st.sampled_from([".metadata", "__0_0.distcp"]))
def test_torch_distributed(damage, name, distributed, places):
    mine = places / "dcp_bad"
    shutil.rmtree(mine, ignore_errors=True)
    shutil.copytree(distributed, mine)
    (mine / name).write_bytes(damaged((distributed / name).read_bytes(), damage))
    read_or_refuse(mine)
