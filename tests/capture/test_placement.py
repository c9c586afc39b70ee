"""Weights that hold several things: placed by the attributes that megatron-core's source gives them.

Transformer Engine and Mamba's packages run on no CPU, so modules with those attributes stand here; that the
source gives them these attributes is a test, too.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from mindspeed_precision.align import align  # noqa: E402
from mindspeed_precision.backends.torch_capture import TorchCapture  # noqa: E402
from mindspeed_precision.capture.names import canonical_names  # noqa: E402
from mindspeed_precision.capture.placement import placements  # noqa: E402
from mindspeed_precision.dump.reader import load_run  # noqa: E402
from mindspeed_precision.dump.writer import RankWriter, create_run  # noqa: E402
from mindspeed_precision.record.placement import cut  # noqa: E402
from mindspeed_precision.records import INIT_STEP, ParameterDeclaration, RankCoordinates  # noqa: E402

BACKEND = TorchCapture()
pytestmark = pytest.mark.torch
HIDDEN, FFN, EXPERTS = 4, 6, 4


@pytest.fixture(autouse=True)
def no_parallel_state(monkeypatch):
    """The tensor-parallel group of experts is asked of Megatron where it is loaded: here it is not."""
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", None)


class TEGroupedLinear(nn.Module):
    """Split but not marked so, as its source says: only partition_dim is stamped."""

    def __init__(self, weights, biases, dim):
        super().__init__()
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            parameter = nn.Parameter(torch.from_numpy(weight.copy()))
            parameter.partition_dim = dim
            setattr(self, f"weight{number}", parameter)
            setattr(self, f"bias{number}", nn.Parameter(torch.from_numpy(bias.copy())))


class Experts(nn.Module):
    def __init__(self, gated):
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=gated)


class MoELayer(nn.Module):
    def __init__(self, indices, gated):
        super().__init__()
        self.local_expert_indices = indices
        self.experts = Experts(gated)


def whole(name, expert, gated):
    """Return what one expert holds, unsplit."""
    rows = 2 * FFN if gated else FFN
    shapes = {"w1": (rows, HIDDEN), "b1": (rows,), "w2": (HIDDEN, FFN), "b2": (HIDDEN,)}
    generator = np.random.default_rng([expert, list(shapes).index(name)])
    return generator.normal(size=shapes[name]).astype(np.float32)


def own_part(value, dim, rank, size, pieces):
    """Split as Megatron does: each of the pieces in equal parts, one of each for a rank."""
    parts = [np.split(piece, size, axis=dim)[rank] for piece in np.split(value, pieces, axis=dim)]
    return np.concatenate(parts, axis=dim)


def grouped(indices, *, tp=0, size=1, gated=True):
    pieces = 2 if gated else 1
    first = [own_part(whole("w1", e, gated), 0, tp, size, pieces) for e in indices]
    biases = [own_part(whole("b1", e, gated), 0, tp, size, pieces) for e in indices]
    second = [own_part(whole("w2", e, gated), 1, tp, size, 1) for e in indices]
    layer = MoELayer(indices, gated)
    layer.experts.linear_fc1 = TEGroupedLinear(first, biases, 0)
    layer.experts.linear_fc2 = TEGroupedLinear(second, [whole("b2", e, gated) for e in indices], 1)
    return nn.ModuleDict({"mlp": layer})


def placed(model, **where):
    names = canonical_names(BACKEND, [model])
    return dict(names.parameters), placements(BACKEND, names, RankCoordinates(**where))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_grouped_experts_are_named_and_placed_as_single_ones(size, gated):
    seen = set()
    for ep in range(2):
        for tp in range(size):
            indices = [2 * ep, 2 * ep + 1]
            model = grouped(indices, tp=tp, size=size, gated=gated)
            where = {"tp_rank": tp, "tp_size": size, "ep_rank": ep, "ep_size": 2}
            parameters, places = placed(model, **where)
            for expert in indices:
                for short, name in (("w1", "linear_fc1.weight"), ("b1", "linear_fc1.bias"),
                                    ("w2", "linear_fc2.weight"), ("b2", "linear_fc2.bias")):  # fmt: skip
                    fqn = f"mlp.experts.{name}{expert}"
                    canonical = whole(short, expert, gated)
                    assert places[fqn].shape == canonical.shape
                    assert np.array_equal(parameters[fqn].detach().numpy(), cut(canonical, places[fqn]))
                    seen.add(fqn)
    assert len(seen) == 4 * EXPERTS


@pytest.mark.parametrize(("where", "known"), [({}, True), ({"tp_size": 2}, False), ({"ep_size": 2}, False)])
def test_experts_in_one_weight_are_placed_where_a_rank_has_all_of_them(where, known):
    class GroupedMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight1 = nn.Parameter(torch.zeros(HIDDEN, 2 * FFN))

    places = placed(nn.ModuleDict({"experts": nn.ModuleDict({"experts": GroupedMLP()})}), **where)[1]
    assert {place is not None for place in places.values()} == {known}


def test_experts_in_one_weight_are_no_copies_of_each_other(tmp_path):
    """Two ranks of one name and shape, each with experts of its own: nothing may be said of them."""
    name = "mlp.experts.weight1"
    runs = []
    for size in (1, 2):
        directory = tmp_path / str(size)
        create_run(directory, {})
        for rank in range(size):
            where = RankCoordinates(
                rank=rank, world_size=size, dp_rank=rank, dp_size=size, ep_rank=rank, ep_size=size
            )
            writer = RankWriter(directory, coordinates=where)
            writer.declare_parameters(
                [ParameterDeclaration(fqn=name, shape=(4, 12 // size), dtype="float32", trainable=True)]
            )
            writer.write_step(INIT_STEP, [], {}, microbatches=0)
            writer.write_step(0, [], {}, microbatches=1)
            writer.close(complete=True)
        runs.append(load_run(directory))
    alignment = align(*runs)
    assert alignment.candidate.ranks[0].parameters == ()
    assert alignment.baseline.ranks[0].parameters == ()


LENGTHS = {"z": 8, "x": 8, "B": 4, "C": 4, "dt": 2}


@pytest.mark.parametrize("size", [1, 2])
def test_several_things_in_one_split_weight(size):
    """Mamba's in_proj: each of z, x, B, C and dt is split, and a rank has its part of each."""
    canonical = np.arange(sum(LENGTHS.values()) * HIDDEN, dtype=np.float32).reshape(-1, HIDDEN)
    things = np.split(canonical, np.cumsum(list(LENGTHS.values()))[:-1])
    for rank in range(size):
        held = np.concatenate([np.split(thing, size)[rank] for thing in things])
        mixer = nn.Module()
        mixer.in_proj = nn.Linear(HIDDEN, len(held), bias=False)
        mixer.A_log = nn.Parameter(torch.zeros(LENGTHS["dt"] // size))
        weight = mixer.in_proj.weight
        weight.data = torch.from_numpy(held.copy())
        for parameter in (weight, mixer.A_log):
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0
        weight.partition_sizes = [length // size for length in LENGTHS.values()]
        model = nn.ModuleDict({"mixer": mixer})
        places = placed(model, tp_rank=rank, tp_size=size)[1]
        assert np.array_equal(held, cut(canonical, places["mixer.in_proj.weight"]))
        assert places["mixer.A_log"].shape == (LENGTHS["dt"],)
        weight.partition_sizes = [1, 2]
        known = placed(model, tp_rank=rank, tp_size=size)[1]["mixer.in_proj.weight"] is not None
        assert known == (size == 1)


def test_a_split_weight_that_says_nothing_of_what_it_holds_has_no_place():
    """As before 0.17."""
    mixer = nn.Module()
    mixer.in_proj = nn.Linear(HIDDEN, 26, bias=False)
    mixer.in_proj.weight.tensor_model_parallel, mixer.in_proj.weight.partition_dim = True, 0
    assert placed(nn.ModuleDict({"mixer": mixer}), tp_size=2)[1] == {"mixer.in_proj.weight": None}


@pytest.mark.megatron
@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_the_source_marks_them_so(version, megatron):
    core = megatron(version) / "megatron" / "core"
    mamba = (core / "ssm" / "mamba_mixer.py").read_text(encoding="utf-8")
    assert 'setattr(self.in_proj.weight, "partition_sizes", in_proj_partition_sizes)' in mamba
    listed = mamba.partition("in_proj_partition_sizes = [")[2].partition("]")[0]
    assert [line.rpartition("# ")[2] for line in listed.strip().splitlines()] == ["z", "x", "B", "C", "dt"]
    engine = (core / "extensions" / "transformer_engine.py").read_text(encoding="utf-8")
    assert "class TEGroupedLinear(te.pytorch.GroupedLinear)" in engine
    assert "class TEColumnParallelGroupedLinear(TEGroupedLinear)" in engine


@pytest.mark.megatron
@pytest.mark.parametrize("version", ["0.12.1", "0.16.1"])
def test_the_source_holds_all_experts_in_one_weight(version, megatron):
    source = megatron(version) / "megatron" / "core" / "transformer" / "moe" / "experts.py"
    assert "self.weight1.view(self.num_local_experts" in source.read_text(encoding="utf-8")
