"""Rules of activations: what is read, what each mistake is called, and where they put a tensor."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass

import pytest

from mindspeed_precision.capture.activations import ActivationPlacer
from mindspeed_precision.capture.layout_rules import load_file, load_layout_rules
from mindspeed_precision.capture.names import Names
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.record.placement import CONTEXT_GROUP, TENSOR_GROUP
from mindspeed_precision.records import Phase, Placement, RankCoordinates, RecordKey, Role, Split, Unplaced

GOOD = """
schema: 1
name: toy
rules:
  - classes: [Linear]
    fqn: "*.first"
    when: {sharded: true}
    input: {"0": "s/sp b h"}
    output: {"0": "s b f/weight[0]", "1": "..."}
    grad_input: {"0": s b h +tp}
"""


def write(tmp_path, text, name="toy.yaml"):
    folder = tmp_path / "layouts"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_read(tmp_path):
    (rule,) = load_file(write(tmp_path, GOOD))
    assert (rule.classes, rule.fqn, rule.when) == (("Linear",), ("*.first",), {"sharded": True})
    first, second, third = rule.form("input", "0").dimensions
    assert [(d.name, d.group, d.weight) for d in (first, second, third)] == [
        ("s", "sp", None),
        ("b", "", None),
        ("h", "", None),
    ]
    assert rule.form("output", "0").dimensions[2].weight == 0
    assert rule.form("output", "1").dimensions is None
    assert rule.form("grad_output", "0") == rule.form("output", "0")
    assert rule.form("grad_input", "0").summed == "tp"
    assert rule.form("input", "weight") is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema: 1", "schema: 2", "another version of the layout rules format"),
        ("name: toy", "name: other", "not the name of the file"),
        ("when:", "whenever:", "whenever"),
        ("s/sp b h", "s/xp b h", "rules[0].input.0: no dimension (found s/xp, expected s, s/tp, s/sp"),
        ("s/sp b h", "s/weight[2] b h", "no dimension (found s/weight[2]"),
        ("s/sp b h", "", "rules[0].input.0: no dimensions"),
        ("+tp", "+dp", "rules[0].grad_input.0: no such group (found dp"),
        ("rules:", "rules: [", "not readable as YAML"),
        ('"*.first"', "3", "rules[0]: speaks of no module"),
    ],
)
def test_a_mistake_is_one_clear_error(old, new, words, tmp_path):
    assert old in GOOD
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_file(write(tmp_path, GOOD.replace(old, new)))
    assert "toy.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "words"),
    [("{}", "speaks of no module"), ("{classes: [A]}", "says nothing (expected input")],
)
def test_a_rule_says_of_what_and_something(rule, words, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_file(write(tmp_path, f"schema: 1\nname: toy\nrules: [{rule}]\n"))


def test_rules_of_the_user_come_first(tmp_path):
    write(tmp_path, GOOD)
    rules = load_layout_rules([tmp_path])
    assert rules[0].classes == ("Linear",)
    assert len(rules) == 1 + len(load_layout_rules())


def test_the_classes_and_attributes_of_the_shipped_rules_exist(megatron):
    """In the sources of some version each, without importing it: a misspelt one would never fit."""
    versions = ("0.12.1", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
    paths = [path for version in versions for path in (megatron(version) / "megatron/core").rglob("*.py")]
    source = "\n".join(path.read_text() for path in paths)
    classes = set(re.findall(r"^class (\w+)", source, re.MULTILINE))
    foreign = {"CoreAttention", "Dropout"}  # of Megatron-LM before core had one, and of torch
    for rule in load_layout_rules():
        assert set(rule.classes) <= classes | foreign, rule.classes
        for name in rule.when:
            assert re.search(rf"\b{name}\b", source), name


@dataclass
class Config:
    sequence_parallel: bool = False


@dataclass
class Root:
    config: Config


class ColumnParallelLinear:
    """Named as Megatron's is: rules go by names."""

    def __init__(self, *, gather_output=False):
        self.gather_output = gather_output


class MindSpeedLinear(ColumnParallelLinear):
    """A class of MindSpeed's kind: it derives from Megatron's."""


class Other:
    """A module of which no rule speaks."""


class Backend:
    """A backend that can number shards."""

    def begin_placed_digest(self, tensor, part, *, statistics, sketch=False):
        raise NotImplementedError


WEIGHT = Placement(shape=(12, 5), splits=(Split(dim=0, blocks=((3, 3), (9, 3))),))


def placer(module, *, tp=2, sp=False, parameters=None, backend=None, rules=None, config=None, **sizes):
    names = Names(
        roots=(Root(config or Config(sequence_parallel=sp)),),
        modules=(("m.fc", module),),
        parameters=(),
        aliases={},
    )
    return ActivationPlacer(
        backend=backend or Backend(),
        rules=rules or load_layout_rules(),
        names=names,
        coordinates=RankCoordinates(tp_rank=1 if tp > 1 else 0, tp_size=tp, **sizes),
        parameters={"m.fc.weight": WEIGHT} if parameters is None else parameters,
    )


def key(role, slot="0", phase=Phase.FPROP, fqn="m.fc"):
    return RecordKey(step=0, microbatch=0, phase=phase, fqn=fqn, role=role, slot=slot)


def test_a_column_parallel_linear_is_split_as_its_weight_is():
    placed = placer(MindSpeedLinear())
    output = placed.place(key(Role.OUTPUT), (4, 2, 6), "float32")
    assert output == Placement(shape=(4, 2, 12), splits=(Split(dim=2, blocks=((3, 3), (9, 3))),))
    assert placed.place(key(Role.GRAD_OUTPUT, phase=Phase.DGRAD), (4, 2, 6), "float32") == output
    assert placed.place(key(Role.INPUT), (4, 2, 5), "float32") == Placement(shape=(4, 2, 5))
    gemm = placed.place(key(Role.GRAD_OUTPUT, "", Phase.WGRAD), (8, 6), "float32")
    assert gemm == Placement(shape=(8, 12), splits=(Split(dim=1, blocks=((3, 3), (9, 3))),))
    assert placed.place(key(Role.OUTPUT), (4, 2, 6), "float32") is output  # asked again, it is found


def test_sequence_parallelism_splits_the_tokens():
    shared = placer(ColumnParallelLinear(), sp=True).place(key(Role.INPUT), (4, 2, 5), "float32")
    assert shared == Placement(shape=(8, 2, 5), splits=(Split(dim=0, blocks=((4, 4),)),))


def split(dim, *blocks):
    return (Split(dim=dim, blocks=blocks),)


@pytest.mark.parametrize(
    ("rank", "size", "blocks"),
    [
        (0, 2, ((0, 2), (6, 2))),
        (1, 2, ((2, 4),)),  # its two chunks follow each other
        (1, 3, ((2, 2), (8, 2))),
    ],
)
def test_context_parallelism_gives_a_rank_two_chunks_of_the_tokens(rank, size, blocks):
    """As ``get_batch_on_this_cp_rank`` of megatron.core.utils cuts: one of each half."""
    placed = placer(ColumnParallelLinear(gather_output=True), tp=1, cp_rank=rank, cp_size=size)
    tokens = Placement(shape=(4 * size, 2, 5), splits=split(0, *blocks))
    assert placed.place(key(Role.INPUT), (4, 2, 5), "float32") == tokens
    # the tokens of all samples, in the operand of dW: sequence first
    rows = Placement(shape=(8 * size, 5), splits=split(0, *((2 * first, 2 * held) for first, held in blocks)))
    assert placed.place(key(Role.INPUT, "", Phase.WGRAD), (8, 5), "float32") == rows


def test_sequence_parallelism_splits_what_context_parallelism_leaves():
    """The tensor-parallel rank 1 has the second half of its context-parallel rank's two chunks."""
    placed = placer(ColumnParallelLinear(), sp=True, cp_size=2)
    assert placed.place(key(Role.INPUT), (2, 2, 5), "float32") == Placement(
        shape=(8, 2, 5), splits=split(0, (6, 2))
    )
    other = placer(ColumnParallelLinear(), sp=True, cp_size=2)
    assert other.place(key(Role.INPUT), (4, 2, 5), "float32").splits == split(0, (12, 4))


def test_what_has_no_tokens_is_a_sum_over_the_parts_of_a_sequence():
    placed = placer(
        ColumnParallelLinear(gather_output=True),
        tp=1,
        cp_size=2,
        parameters={"m.fc.weight": Placement(shape=(12, 5))},
    )
    assert placed.place(key(Role.WGRAD, "", Phase.WGRAD), (12, 5), "float32").partial == CONTEXT_GROUP
    assert placed.place(key(Role.GRAD_OUTPUT, "1", Phase.DGRAD), (12,), "float32").partial == CONTEXT_GROUP
    assert placed.place(key(Role.OUTPUT, "1"), (12,), "float32").partial == ""
    assert placed.place(key(Role.OUTPUT), (4, 2, 12), "float32").partial == ""


class FusedScaleMaskSoftmax:
    """Named as Megatron's is."""


def test_what_context_parallelism_orders_otherwise_is_not_placed():
    scores = placer(FusedScaleMaskSoftmax(), cp_size=2)
    found = scores.place(key(Role.OUTPUT), (2, 4, 4, 8), "float32")
    assert "under context parallelism: keys come in an order of their own" in found.reason
    assert isinstance(
        placer(FusedScaleMaskSoftmax()).place(key(Role.OUTPUT), (2, 4, 4, 8), "float32"), Placement
    )
    mask = scores.place(key(Role.INPUT, "1"), (1, 1, 4, 8), "bool")
    assert "its dimensions are not named" in mask.reason


class RowParallelLinear:
    """Of an expert."""

    is_expert = True


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_linear_of_an_expert(size, monkeypatch):
    """Its output is a term of a sum; which term, is known of the whole tensor-parallel group alone."""
    state = types.SimpleNamespace(
        get_expert_tensor_parallel_world_size=lambda: size, get_expert_tensor_parallel_rank=lambda: size - 1
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    placed = placer(RowParallelLinear(), tp=2).place(key(Role.OUTPUT), (7, 5), "float32")
    if size > 2:
        assert "is not as its layout rule says" in placed.reason
    else:
        assert placed == Placement(shape=(7, 5), partial=TENSOR_GROUP if size == 2 else "")
    context = placer(RowParallelLinear(), tp=2, cp_size=2).place(key(Role.OUTPUT), (7, 5), "float32")
    assert "tokens of an expert come in an order of their own" in context.reason
    config = Config()
    config.moe_expert_capacity_factor = 1.0
    uneven = placer(RowParallelLinear(), tp=2, config=config).place(key(Role.OUTPUT), (7, 5), "float32")
    assert "where tokens are dropped or padded by rank" in uneven.reason


@pytest.mark.parametrize(
    ("name", "value"),
    [("context_parallel_algo", "ulysses_cp_algo"), ("cp_attention_mask_type", "general")],
)
def test_a_sequence_that_mindspeed_cuts_otherwise_is_not_placed(name, value):
    config = Config()
    setattr(config, name, value)
    found = placer(ColumnParallelLinear(), config=config, cp_size=2).place(
        key(Role.INPUT), (4, 2, 5), "float32"
    )
    assert "the sequence is not cut as Megatron does" in found.reason
    assert isinstance(
        placer(ColumnParallelLinear(), config=config).place(key(Role.INPUT), (4, 2, 5), "float32"), Placement
    )


def test_an_output_that_is_gathered_is_whole():
    placed = placer(ColumnParallelLinear(gather_output=True))
    assert placed.place(key(Role.OUTPUT), (4, 2, 12), "float32") == Placement(shape=(4, 2, 12))


@pytest.mark.parametrize(
    ("asked", "shape", "dtype", "reason"),
    [
        (key(Role.OUTPUT), (4, 2, 7), "float32", "is not as its layout rule says (s b f/weight[0])"),
        (key(Role.OUTPUT), (8, 6), "float32", "is not as its layout rule says"),
        (key(Role.OUTPUT), (4, 2, 6), "complex64", "no layout rule for complex64"),
        (key(Role.OUTPUT, "7"), (4, 2, 6), "float32", "no layout rule for output[7] of ColumnParallelLinear"),
        (key(Role.INPUT, "all_reduce"), (4, 2, 6), "float32", "no layout rule for what a collective is"),
        (key(Role.OUTPUT, fqn="x"), (4, 2, 6), "float32", "of x, which is no module"),
    ],
)
def test_what_no_rule_fits_is_not_placed(asked, shape, dtype, reason):
    found = placer(ColumnParallelLinear()).place(asked, shape, dtype)
    assert isinstance(found, Unplaced)
    assert reason in found.reason


def test_a_weight_that_has_no_placement_leaves_its_output_without_one():
    found = placer(ColumnParallelLinear(), parameters={"m.fc.weight": None})
    assert isinstance(found.place(key(Role.OUTPUT), (4, 2, 6), "float32"), Unplaced)
    other = placer(Other()).place(key(Role.OUTPUT), (4, 2, 6), "float32")
    assert other == Unplaced(reason="no layout rule for output[0] of Other")


def test_nothing_is_said_where_nothing_is_split_or_can_be_numbered():
    output, module = key(Role.OUTPUT), ColumnParallelLinear()
    assert placer(module, tp=1, dp_size=4).place(output, (4, 2, 6), "float32") is None
    assert placer(module, backend=object()).place(output, (4, 2, 6), "float32") is None
    assert placer(module).place(key(Role.BATCH, phase=Phase.BATCH), (4, 2), "int64") is None


def test_a_sum_over_the_group_is_marked(tmp_path):
    write(tmp_path, GOOD.replace('fqn: "*.first"', 'fqn: "m.fc"').replace("[Linear]", "[Other]"))
    module = Other()
    module.sharded = True
    placed = placer(module, rules=load_file(tmp_path / "layouts" / "toy.yaml"))
    gradient = placed.place(key(Role.GRAD_INPUT, phase=Phase.DGRAD), (4, 2, 5), "float32")
    assert gradient == Placement(shape=(4, 2, 5), partial=TENSOR_GROUP)
