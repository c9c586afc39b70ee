"""Statistics in TensorBoard's and Weights & Biases' own files, read back by their own readers."""

from __future__ import annotations

import importlib.util
import json
import math
import struct

import numpy as np
import pytest

from mindspeed_precision import load_run
from mindspeed_precision.cli import main
from mindspeed_precision.config import load_settings
from mindspeed_precision.dump.encode import digest_text
from mindspeed_precision.errors import ConfigError, DumpError, PrecisionError
from mindspeed_precision.export import LiveExport, StepValues, export_run, open_live, seen_of, seen_of_text
from mindspeed_precision.records import INIT_STEP, Level, Role
from mindspeed_precision.testing.fake_runs import LINEAR, plant, write_fake_run

boards = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def events(directory):
    """Return ``{tag: {step: value}}`` as TensorBoard reads a directory."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: {one.step: one.value for one in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def norms(run, role, fqn, phase):
    return {
        record.key.step: record.digest.statistics.l2_norm
        for record in run.ranks[0].records
        if (record.key.role, record.key.fqn, record.key.phase.value) == (role, fqn, phase)
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    pytest.importorskip("tensorboard")
    directory = tmp_path_factory.mktemp("export")
    run = write_fake_run(directory / "run", ranks=2, steps=3)
    found = export_run(run, tensorboard=str(directory / "tb"))
    return load_run(run), found, directory / "tb" / "run"


def test_each_rank_is_a_run_with_every_step(exported):
    _, found, directory = exported
    assert sorted(path.name for path in directory.iterdir()) == ["rank00000", "rank00001"]
    assert found.headline == "EXPORTED: 2 ranks of run."
    values = events(directory / "rank00000")
    assert all(sorted(by_step) == [0, 1, 2] for by_step in values.values())
    assert sum(map(len, values.values())) == found.outcomes[0].exercised


def test_the_numbers_are_those_of_the_run(exported):
    run, _, directory = exported
    values = events(directory / "rank00000")
    weight = f"{LINEAR}.weight"
    for tag, role, phase in (
        (f"dW/{weight}", Role.REDUCED_GRAD, "reduce"),
        (f"param/{weight}", Role.PARAM, "optimizer"),
        (f"exp_avg/{weight}", Role.EXP_AVG, "optimizer"),
        (f"exp_avg_sq/{weight}", Role.EXP_AVG_SQ, "optimizer"),
    ):
        assert values[tag] == pytest.approx(norms(run, role, weight, phase), rel=1e-6), tag
    loss = {r.key.step: r.value for r in run.ranks[0].records if r.key.slot == "lm loss"}
    assert values["loss/lm loss"] == pytest.approx(loss, rel=1e-6)
    assert values["learning_rate"] == pytest.approx(dict.fromkeys(range(3), 0.01))
    assert "learning_rate_min" not in values
    assert values["nonfinite/nans"] == dict.fromkeys(range(3), 0.0)
    parts = [
        record.digest.statistics.l2_norm
        for record in run.ranks[0].records
        if (record.key.step, record.key.role, record.key.fqn) == (1, Role.OUTPUT, LINEAR)
    ]
    assert len(parts) == 2  # microbatches
    assert values[f"output/{LINEAR}"][1] == pytest.approx(math.hypot(*parts), rel=1e-6)
    assert "output/(model)" in values


@boards
def test_what_is_not_finite_is_counted_and_shown(tmp_path):
    broken = plant(role="output", fqn=LINEAR, step=1, microbatch=0, value=lambda v: v * np.float32("nan"))
    run = write_fake_run(tmp_path / "run", plants=[broken])
    export_run(run, tensorboard=str(tmp_path / "tb"))
    values = events(tmp_path / "tb" / "run" / "rank00000")
    assert values["nonfinite/nans"][0] == 0
    assert values["nonfinite/nans"][1] > 0
    assert math.isnan(values["loss/lm loss"][1])


@boards
def test_two_learning_rates_are_both_shown(tmp_path):
    other = plant(role="hyperparameter", slot="lr", fqn="*bias", value=lambda v: v * 0.5)
    run = write_fake_run(tmp_path / "run", plants=[other])
    export_run(run, tensorboard=str(tmp_path / "tb"))
    values = events(tmp_path / "tb" / "run" / "rank00000")
    assert (values["learning_rate"][0], values["learning_rate_min"][0]) == pytest.approx((0.01, 0.005))


@boards
def test_live_gives_the_same_numbers_as_the_recorded_run(tmp_path):
    """The text of a digest, as a step is written, and the record that is read back."""
    run = load_run(write_fake_run(tmp_path / "run"))
    settings = load_settings(None, [f"export.tensorboard={tmp_path / 'tb'}"], tmp_path / "live")
    live = open_live(settings.export, settings.out, rank=0)
    records = run.ranks[0].records
    for step in (INIT_STEP, 0, 1):
        live.end_step(step, [(r.key, digest_text(r.digest)) for r in records if r.key.step == step])
    live.close()
    export_run(tmp_path / "run", tensorboard=str(tmp_path / "tb"))
    assert events(tmp_path / "tb" / "live" / "rank00000") == events(tmp_path / "tb" / "run" / "rank00000")


def test_a_digest_reads_alike_from_text_and_record(tmp_path):
    """Also of NaN, infinities and single numbers; None where there are no statistics."""
    broken = plant(role="output", value=lambda v: v * np.float32("inf"))
    for level in (Level.STATISTICS, Level.FINGERPRINT):
        run = load_run(write_fake_run(tmp_path / level.value, level=level, plants=[broken]))
        for record in run.ranks[0].records:
            one, two = seen_of(record), seen_of_text(record.key, digest_text(record.digest))
            assert (one is None) == (two is None) == (level is Level.FINGERPRINT)
            if one is not None:
                assert (one.nans, one.infs) == (two.nans, two.infs)
                assert one.l2_norm == pytest.approx(two.l2_norm, nan_ok=True)


def test_nothing_asked_for_is_nothing_opened(tmp_path):
    assert open_live(load_settings().export, tmp_path, rank=0) is None
    with pytest.raises(ConfigError, match="nothing to export to"):
        export_run(write_fake_run(tmp_path / "run"))


def test_a_run_without_statistics_is_refused(tmp_path):
    run = write_fake_run(tmp_path / "run", level=Level.FINGERPRINT)
    with pytest.raises(DumpError, match="no record of this run has statistics"):
        export_run(run, tensorboard=str(tmp_path / "tb"))
    assert not (tmp_path / "tb").exists()


@boards
def test_two_runs_never_share_a_directory(tmp_path, capsys):
    run = write_fake_run(tmp_path / "run")
    command = ["export", str(run), "--tensorboard", str(tmp_path / "tb")]
    assert main(command) == 0
    assert f"tensorboard --logdir {tmp_path / 'tb'}" in capsys.readouterr().out
    assert main([*command, "--json"]) == 2
    assert "there are event files already" in capsys.readouterr().err


def test_a_missing_package_is_one_error_with_the_pip_line(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PrecisionError, match=r"pip install 'mindspeed-precision\[wandb\]'"):
        export_run(write_fake_run(tmp_path / "run"), wandb="project")


@boards
def test_json_says_what_was_written(tmp_path, capsys):
    run = write_fake_run(tmp_path / "run")
    assert main(["export", str(run), "--tensorboard", str(tmp_path / "tb"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tables"]["written"] == [str(tmp_path / "tb" / "run" / "rank00000")]


class Failing:
    """A writer whose disk is full."""

    def __init__(self):
        self.calls = 0

    def add(self, step, values):
        self.calls += 1
        raise OSError("No space left on device")

    def close(self):
        raise AssertionError("it was left out")


class Kept(Failing):
    def add(self, step, values):
        self.calls += 1

    def close(self):
        self.calls += 100


def test_a_writer_that_fails_is_left_out_and_said_and_the_others_go_on(capsys):
    bad, good = Failing(), Kept()
    live = LiveExport([bad, good])
    live.end_step(0, [])
    live.end_step(1, [])
    live.close()
    assert (bad.calls, good.calls) == (1, 102)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "Failing failed and is left out from now on: No space left on device" in err


def test_a_step_without_statistics_has_no_numbers():
    assert StepValues().values() == {}


def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = write_fake_run(tmp_path / "run")
    found = export_run(run, wandb="precision")
    (written,) = found.tables["written"]
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert written == str(file.parent)
    assert found.tables["next"] == (f"wandb sync {written}",)
    history = wandb_history(file)
    assert [row["_step"] for row in history] == [0, 1]
    assert history[1]["learning_rate"] == pytest.approx(0.01)
    assert f"dW/{LINEAR}.weight" in history[0]


def wandb_history(file):
    """Return the rows of a run: records of wandb's protocol in blocks of 32 KiB, as in leveldb's log."""
    from wandb.proto import wandb_internal_pb2

    data, rows, whole = file.read_bytes(), [], b""
    position = 7  # ":W&B", magic, version
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # what is left of a block holds no header
            position += 32768 - position % 32768
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last chunk
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


@boards
@pytest.mark.torch
def test_a_training_with_live_export_has_the_same_bits(tmp_path):
    torch = pytest.importorskip("torch")
    from mindspeed_precision.session import Session
    from mindspeed_precision.testing.recorded import UNPINNED

    def train(name, *overrides):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        options = [*UNPINNED, *overrides]
        with Session(model=model, optimizer=optimizer, out=tmp_path / name, overrides=options) as session:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
                session.step()
        records = load_run(tmp_path / name).ranks[0].records
        return [(record.key, record.digest) for record in records]

    without = train("without")
    assert train("with", f"export.tensorboard={tmp_path / 'tb'}") == without
    values = events(tmp_path / "tb" / "with" / "rank00000")
    assert set(values["param/0.weight"]) == {0, 1}
    assert values["dW/0.weight"][0] > 0
    assert values["output/0"][0] > 0
