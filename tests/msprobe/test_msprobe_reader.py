"""Dumps that msprobe made become runs; what is not there is said; what is broken is refused or named."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mindspeed_precision import load_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.msprobe.reader import is_dump, load_dump
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import INIT_STEP, Phase, Role

L0 = "torch-L0-statistics-statistics"
MIX = "torch-mix-statistics-statistics"
TENSOR = "torch-L0-tensor-statistics"


def records(run, **wanted):
    found = (r for rank in run.ranks.values() for r in rank.records)
    return [r for r in found if all(getattr(r.key, name) == value for name, value in wanted.items())]


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_modules_parameters_and_gradients_have_our_names(golden, framework):
    run = load_run(golden(f"{framework}-L0-statistics-statistics"))
    assert is_dump(run)
    assert run.framework == framework
    assert run.ranks[0].steps == (INIT_STEP, 0, 1)
    assert run.ranks[0].microbatches == {0: 1, 1: 1}
    names = {"fc1.weight", "fc2.weight", "norm.weight", "norm.bias", "head.weight"}
    assert {p.fqn for p in run.ranks[0].parameters} == names
    assert {r.key.fqn for r in records(run, phase=Phase.INIT, role=Role.PARAM)} == names
    assert {r.key.fqn for r in records(run, phase=Phase.OPTIMIZER, step=0)} == names
    assert {r.key.fqn for r in records(run, phase=Phase.FPROP)} == {"fc1", "fc2", "norm", "head"}
    phase = Phase.ACCUMULATE if framework == "torch" else Phase.WGRAD
    assert {r.key.fqn for r in records(run, phase=phase, step=1)} == names


def test_the_order_is_that_of_execution(golden):
    run = load_run(golden(L0))
    order = [(r.key.fqn, r.key.role) for r in records(run, step=0) if r.key.phase is not Phase.OPTIMIZER]
    assert [r.seq for r in run.ranks[0].records] == list(range(len(run.ranks[0].records)))
    wanted = [
        ("fc1", Role.INPUT),
        ("fc1", Role.OUTPUT),
        ("fc2", Role.INPUT),
        ("head", Role.OUTPUT),
        ("head", Role.GRAD_OUTPUT),
        ("head.weight", Role.MAIN_GRAD),
        ("head", Role.GRAD_INPUT),
        ("fc1", Role.GRAD_OUTPUT),
        ("fc1.weight", Role.MAIN_GRAD),
    ]
    assert [entry for entry in order if entry in wanted] == wanted


def test_statistics_are_msprobes_and_what_it_lacks_is_not_there(golden):
    run = load_run(golden(L0))
    (record,) = records(run, fqn="fc1.weight", phase=Phase.INIT)
    found = record.digest
    assert not found.exact
    assert found.statistics is not None
    assert not found.statistics.counted
    assert found.statistics.l2_norm == pytest.approx(2.3044903, rel=1e-6)
    assert record.payload is None
    assert record.layout is None
    assert any("fingerprints, counts of zeros" in note for note in run.notes)


def test_elements_give_our_fingerprints(golden):
    run = load_run(golden(TENSOR))
    (record,) = records(run, fqn="fc1.weight", phase=Phase.INIT)
    host = run.ranks[0].payload(record)
    assert host.bits.shape == record.shape == (8, 6)
    assert record.digest.exact
    assert record.digest == digest_host(host, statistics=True)
    assert all(r.digest.exact for r in run.ranks[0].records)


@pytest.mark.parametrize("name", ["mindspore-L0-tensor-statistics"])
def test_elements_of_mindspore(golden, name):
    run = load_run(golden(name))
    torch = load_run(golden(TENSOR))
    one, two = (records(r, fqn="fc1.weight", phase=Phase.INIT)[0] for r in (run, torch))
    assert one.digest.fingerprint == two.digest.fingerprint != 0


def test_a_part_of_a_gradient_is_told_from_the_whole(golden):
    run = load_run(golden(L0))
    part = {(r.key.fqn, r.key.role) for r in records(run, step=0) if r.note}
    assert ("norm", Role.GRAD_INPUT) in part  # hidden is read by the norm and by the sum behind it
    assert ("norm", Role.GRAD_OUTPUT) not in part


def test_operations_have_the_place_that_construct_json_gives(golden):
    run = load_run(golden(MIX))
    names = {r.key.fqn for r in records(run, phase=Phase.FPROP, step=0)}
    assert "fc1.Functional.linear" in names
    assert {"fc1", "fc2", "norm", "head"} <= names
    linear = records(run, fqn="fc1.Functional.linear", role=Role.OUTPUT, step=0)
    (module,) = records(run, fqn="fc1", role=Role.OUTPUT, step=0)
    assert [r.summary for r in linear] == [module.summary]


def test_without_construct_json_operations_have_no_place(golden):
    run = load_run(golden("torch-L1-statistics-statistics"))
    assert {r.key.microbatch for r in run.ranks[0].records} == {-1}
    assert any("construct.json names no module" in note for note in run.notes)


def test_checksums_are_kept(golden):
    run = load_run(golden("torch-L0-statistics-md5"))
    assert all(len(r.summary.checksum) == 8 for r in run.ranks[0].records)
    run = load_run(golden("torch-L0-statistics-xor"))
    assert all(r.summary.checksum.startswith("0x") for r in run.ranks[0].records)
    assert all(r.digest.statistics is None for r in run.ranks[0].records)


@pytest.mark.parametrize("inner", ["", "step0", "step0/proc0", "step0/proc0/dump.json"])
def test_a_dump_a_step_a_rank_and_a_file_are_taken(golden, inner):
    run = load_run(golden(L0) / inner)
    assert 0 in run.ranks[0].steps


def test_what_is_neither_run_nor_dump_is_refused(tmp_path):
    with pytest.raises(DumpError, match="not a run"):
        load_run(tmp_path)
    with pytest.raises(DumpError, match="no dump of msprobe"):
        load_dump(tmp_path)


def entries(dump):
    file = dump / "step0" / "proc0" / "dump.json"
    return file, json.loads(file.read_text())


def changed(dump, change):
    file, plain = entries(dump)
    change(plain)
    file.write_text(json.dumps(plain))
    return dump


def test_a_truncated_step_is_left_out_by_name(copied):
    dump = copied(L0)
    file, _ = entries(dump)
    file.write_text(file.read_text()[:-200])
    run = load_run(dump)
    assert run.ranks[0].steps == (1,)
    assert any("left out" in note and "not readable as JSON" in note for note in run.notes)
    assert any("step 0 is not in the dump" in note for note in run.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not readable as JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no entries"),
        ('{"framework": "pytorch", "data": []}', "no entries"),
        ('{"framework": "jax", "data": {}}', "another framework"),
        ('{"framework": ["pytorch"], "data": {}}', "another framework"),
        ('{"data": {}, "data": {}}', "twice"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not readable as JSON"),
    ],
)
def test_a_file_that_is_none_of_msprobes_is_one_clear_error(copied, text, said):
    dump = copied("torch-L0-statistics-md5")
    entries(dump)[0].write_text(text)
    with pytest.raises(DumpError, match=said):
        load_run(dump)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("text", "no objects"),
        ({"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": "x"}]}, "no shape"),
        ({"output": [{"type": "torch.Tensor", "dtype": 3, "shape": [1]}]}, "no dtype"),
        ({"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [-1]}]}, "no shape"),
    ],
)
def test_an_entry_of_another_shape_is_named(copied, entry, said):
    def change(plain):
        plain["data"]["Module.fc1.Linear.forward.0"] = entry

    run = load_run(changed(copied("torch-L0-statistics-md5"), change))
    assert any(said in note and "fc1" in note for note in run.notes), run.notes
    assert records(run, fqn="fc2", phase=Phase.FPROP)


def test_nesting_without_end_is_named(copied):
    deep = None
    for _ in range(500):
        deep = [deep]

    def change(plain):
        plain["data"]["Module.fc1.Linear.forward.0"]["output"] = deep

    run = load_run(changed(copied("torch-L0-statistics-md5"), change))
    assert any("nested more than" in note for note in run.notes)


def test_an_unknown_name_is_named(copied):
    def change(plain):
        plain["data"]["Something.else"] = {}

    run = load_run(changed(copied(L0), change))
    assert any("Something.else" in note for note in run.notes)


def test_a_parent_that_runs_inside_itself_ends(copied):
    dump = copied(L0)
    file = dump / "step0" / "proc0" / "construct.json"
    name = "Module.fc1.Linear.forward.0"
    file.write_text(json.dumps({name: "Module.fc2.Linear.forward.0", "Module.fc2.Linear.forward.0": name}))
    assert records(load_run(dump), fqn="fc1", step=0)


def test_nan_and_infinity_are_numbers_and_are_told(copied):
    def change(plain):
        entry = plain["data"]["Module.fc1.Linear.forward.0"]["output"][0]
        entry.update(Max=math.nan, Min=-1.0, Mean=math.nan, Norm=math.nan)

    run = load_run(changed(copied(L0), change))
    (record,) = records(run, fqn="fc1", role=Role.OUTPUT, step=0)
    assert record.summary.nonfinite
    assert record.digest.statistics is None


def test_null_gradients_are_named(copied):
    def change(plain):
        plain["data"]["Module.fc1.Linear.parameters_grad.0"] = {"weight": [None]}

    run = load_run(changed(copied(L0), change))
    assert any("gradients of parameters are null" in note and "fc1.weight" in note for note in run.notes)


@pytest.mark.parametrize("name", ["../dump.json", "/etc/passwd", "..", "a/b.pt", "x\\y.pt", "no.pt", "x.bin"])
def test_elements_outside_the_directory_are_not_read(copied, name):
    def change(plain):
        plain["data"]["Module.fc1.Linear.forward.0"]["output"][0]["data_name"] = name

    run = load_run(changed(copied(TENSOR), change))
    (record,) = records(run, fqn="fc1", role=Role.OUTPUT, step=0)
    assert record.payload is None
    assert any("cannot be read" in note for note in run.notes)


def test_a_link_is_not_followed(copied, tmp_path):
    dump = copied(TENSOR)
    elements = dump / "step0" / "proc0" / "dump_tensor_data"
    file = elements / "Module.fc1.Linear.forward.0.output.0.pt"
    file.rename(tmp_path / "elsewhere.pt")
    file.symlink_to(tmp_path / "elsewhere.pt")
    run = load_run(dump)
    assert any("no such file of elements" in note for note in run.notes)


def test_an_array_that_claims_more_than_it_holds_takes_no_memory(copied):
    dump = copied("mindspore-L0-tensor-statistics")
    file = next((dump / "step0" / "proc0" / "dump_tensor_data").glob("*fc1*forward.0.output.0.npy"))
    with file.open("wb") as made:
        np.lib.format.write_array_header_1_0(
            made, {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**6)}
        )
    run = load_run(dump)
    assert any("not readable as an array" in note for note in run.notes)


def test_a_pickled_array_is_not_unpickled(copied):
    dump = copied("mindspore-L0-tensor-statistics")
    file = next((dump / "step0" / "proc0" / "dump_tensor_data").glob("*fc1*forward.0.output.0.npy"))
    np.save(file, np.array([{"a": 1}], dtype=object))
    assert any("not readable as an array" in note for note in load_run(dump).notes)
