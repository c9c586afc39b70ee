"""Our runs as dumps of msprobe: what is read back is what was written, and what has no place is said."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from mindspeed_precision import compare_runs, load_run
from mindspeed_precision.errors import DumpError
from mindspeed_precision.msprobe.export import export_run
from mindspeed_precision.records import Phase, Role, Verdict
from mindspeed_precision.testing.fake_runs import plant, scaled, write_fake_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    write_fake_run(out)
    return load_run(out)


def test_a_dump_has_msprobes_files_and_names(run, tmp_path):
    found = export_run(run, tmp_path / "dump")
    rank = tmp_path / "dump" / "step0" / "rank0"
    assert {"dump.json", "construct.json", "stack.json"} <= {path.name for path in rank.iterdir()}
    plain = json.loads((rank / "dump.json").read_text())
    assert plain["level"] == "L0"
    assert plain["framework"] == "pytorch"
    names = [name for name in plain["data"] if "linear_fc1" in name and "layers.1" in name]
    assert any(name.endswith(".forward.0") for name in names)
    assert any(name.endswith(".parameters_grad.1") for name in names)
    assert found.entries > 0
    assert any("no entry for these records" in note for note in found.notes)
    assert any("--like" in note for note in found.notes)


def test_what_is_written_agrees_with_the_run_it_is_of(run, tmp_path):
    export_run(run, tmp_path / "dump")
    found = compare_runs(run, load_run(tmp_path / "dump"))
    assert found.status in (Verdict.WITHIN_TOLERANCE, Verdict.IDENTICAL), found.findings
    assert found.coverage.unmatched == 0
    assert found.coverage.matched > 100


def test_a_fault_is_in_what_is_written(run, tmp_path):
    linear = "decoder.layers.1.mlp.linear_fc1"
    write_fake_run(tmp_path / "bad", plants=[plant(role="wgrad", fqn=linear, value=scaled(2))])
    export_run(load_run(tmp_path / "bad"), tmp_path / "dump")
    found = compare_runs(run, load_run(tmp_path / "dump"))
    assert found.status is Verdict.DIVERGED
    assert found.first_divergence.key.fqn.startswith(linear)


def test_an_export_is_exported_no_further(run, tmp_path):
    export_run(run, tmp_path / "dump")
    with pytest.raises(DumpError, match="already a dump"):
        export_run(load_run(tmp_path / "dump"), tmp_path / "again")


def test_nothing_is_overwritten(run, tmp_path):
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "mine").write_text("x")
    with pytest.raises(DumpError, match="not empty"):
        export_run(run, tmp_path / "dump")
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]


def test_names_are_those_of_a_dump_that_is_given(run, tmp_path):
    export_run(run, tmp_path / "first")
    file = tmp_path / "first" / "step0" / "rank0" / "dump.json"
    file.write_text(file.read_text().replace("Module.module.", "Module.module.module."))
    export_run(run, tmp_path / "second", like=tmp_path / "first")
    data = json.loads((tmp_path / "second" / "step0" / "rank0" / "dump.json").read_text())["data"]
    assert all(name.startswith("Module.module.module") for name in data)


@pytest.mark.torch
def test_elements_are_written_where_all_were_kept(tmp_path):
    torch = pytest.importorskip("torch")
    from small_net import torch_net, torch_steps

    from mindspeed_precision.session import Session

    net, optimizer = torch_net()
    overrides = ["determinism.enabled=false", "capture.level=tensor"]
    with Session(model=[net], optimizer=optimizer, out=tmp_path / "run", overrides=overrides) as session:
        torch_steps(net, optimizer, 1, after=lambda loss: session.step(loss=loss))
    run = load_run(tmp_path / "run")
    assert export_run(run, tmp_path / "dump").task == "tensor"
    elements = tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data"
    weight = torch.load(next(elements.glob("*fc1*parameters.weight.pt")), weights_only=True)
    assert weight.shape == (8, 6)
    again = load_run(tmp_path / "dump")
    keys = {record.key: record for record in run.ranks[0].records}
    for record in again.ranks[0].records:
        if record.key.phase in (Phase.FPROP, Phase.ACCUMULATE) or record.key.role is Role.GRAD_OUTPUT:
            assert record.digest.fingerprint == keys[record.key].digest.fingerprint, record.key
    assert compare_runs(run, again).status is Verdict.IDENTICAL
    like = Path(__file__).with_name("golden") / "torch-L0-statistics-statistics"
    assert export_run(run, tmp_path / "as", like=like).task == "statistics"
    assert not list((tmp_path / "as").rglob("*.pt"))


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_permissions_are_what_the_umask_leaves(tmp_path, mask):
    run = write_fake_run(tmp_path / "run")
    before = os.umask(mask)
    try:
        export_run(load_run(run), tmp_path / "above" / "dump")
    finally:
        os.umask(before)
    written = list((tmp_path / "above").rglob("*.json"))
    assert len(written) > 2
    for path in [*written, tmp_path / "above"]:
        assert not stat.S_IMODE(path.stat().st_mode) & (mask | stat.S_IWOTH), path
