"""The recorder: levels, order, problems, and that it never gets in the way of the training."""

from __future__ import annotations

import gc
import math
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mindspeed_precision.backends import load_backend  # noqa: E402
from mindspeed_precision.config import load_settings  # noqa: E402
from mindspeed_precision.dump.reader import load_run  # noqa: E402
from mindspeed_precision.dump.writer import RankWriter, create_run  # noqa: E402
from mindspeed_precision.errors import DumpError  # noqa: E402
from mindspeed_precision.record.recorder import Recorder  # noqa: E402
from mindspeed_precision.record.sketch import sketch_values, unpack  # noqa: E402
from mindspeed_precision.records import (  # noqa: E402
    INIT_STEP,
    Level,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
)

pytestmark = pytest.mark.torch


def key(step, fqn="layer", role=Role.OUTPUT, **more):
    return RecordKey(step=step, phase=Phase.FPROP, fqn=fqn, role=role, **more)


def site(recorder, key):
    assert key.step == recorder.step
    found = recorder.site(
        key.phase, key.fqn, key.role, key.slot, key.microbatch, key.occurrence, key.recomputed
    )
    assert found is None or found.key.describe().partition(":")[2] == key.describe().partition(":")[2]
    return found


def see(recorder, key, tensor, **more):
    if (found := site(recorder, key)) is not None:
        recorder.observe(found, tensor, **more)


def note_number(recorder, key, value):
    if (found := site(recorder, key)) is not None:
        recorder.observe_number(found, value)


def note_bytes(recorder, key, data):
    if (found := site(recorder, key)) is not None:
        recorder.observe_bytes(found, data)


@pytest.fixture
def recorder_of(tmp_path):
    def make(*overrides, backend=None):
        run = tmp_path / "run"
        create_run(run, {"parallel": RankCoordinates().sizes()})
        writer = RankWriter(run, coordinates=RankCoordinates())
        settings = load_settings(overrides=list(overrides))
        return run, Recorder(backend=backend or load_backend("torch"), writer=writer, settings=settings)

    return make


def test_levels_and_payloads(recorder_of):
    rules = "capture.rules=[{fqn: kept, level: tensor}, {fqn: dropped, level: drop}]"
    run, recorder = recorder_of("capture.level=fingerprint", rules)
    recorder.begin_step(0)
    assert site(recorder, key(0, "plain")).level is Level.FINGERPRINT
    assert site(recorder, key(0, "dropped")) is None
    tensor = torch.arange(6.0).reshape(2, 3).t()
    for fqn in ("plain", "kept", "dropped"):
        see(recorder, key(0, fqn, microbatch=1), tensor, note="why")
    tensor.zero_()
    recorder.end_step()
    recorder.close(complete=True)
    rank = load_run(run).ranks[0]
    plain, kept = rank.records
    assert (plain.key.fqn, plain.digest.statistics, plain.payload) == ("plain", None, None)
    assert (kept.shape, kept.dtype, kept.layout.stride, kept.note) == ((3, 2), "float32", (1, 3), "why")
    assert kept.digest.statistics.maximum == 5
    assert rank.payload(kept).bits.view("float32").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert plain.digest.fingerprint == kept.digest.fingerprint
    assert rank.microbatches == {0: 2}
    with pytest.raises(DumpError, match="no elements were kept"):
        rank.payload(plain)


@pytest.mark.parametrize(
    ("level", "kept"),
    [("fingerprint", (0, 0, 0)), ("statistics", (1, 0, 0)), ("sketch", (1, 1, 0)), ("tensor", (1, 1, 1))],
)
def test_each_level_includes_the_ones_before(recorder_of, level, kept):
    run, recorder = recorder_of(f"capture.level={level}")
    recorder.begin_step(0)
    tensor = torch.linspace(-1, 1, 600).reshape(20, 30).t()
    for fqn, value in (("layer", tensor), ("one", tensor[0, 0]), ("tokens", torch.arange(9))):
        see(recorder, key(0, fqn), value)
    note_bytes(recorder, key(0, "rng", Role.RNG), b"abc")
    recorder.end_step()
    layer, *others = load_run(run).ranks[0].records
    found = layer.digest.statistics, layer.digest.sketch, layer.payload
    assert tuple(part is not None for part in found) == tuple(map(bool, kept))
    assert all(other.digest.sketch is None for other in others)  # one number, and integers
    if layer.digest.sketch is not None:
        wanted = sketch_values(tensor.numpy())
        np.testing.assert_allclose(unpack(layer.digest.sketch), wanted, rtol=2.0**-28, atol=1e-12)


def test_what_a_log_prints_has_its_value_at_every_level(recorder_of):
    run, recorder = recorder_of("capture.level=fingerprint")
    recorder.begin_step(0)
    for role in (Role.LOSS, Role.GRAD_NORM, Role.OUTPUT):
        see(recorder, key(0, role=role), torch.tensor(2.5))
    recorder.end_step()
    recorder.close(complete=True)
    values = {record.key.role: record.value for record in load_run(run).ranks[0].records}
    assert values == {Role.LOSS: 2.5, Role.GRAD_NORM: 2.5, Role.OUTPUT: None}


def test_steps_that_are_not_wanted_leave_no_trace(recorder_of):
    run, recorder = recorder_of("steps='1'", "capture.rules=[{fqn: late, steps: '1', level: drop}]")
    for step in (INIT_STEP, 0, 1, 2):
        if step != INIT_STEP:
            recorder.begin_step(step)
        for fqn in ("early", "late"):
            see(recorder, key(step, fqn), torch.ones(2))
        note_number(recorder, key(step, "number"), step)
        recorder.end_step()
    recorder.close(complete=True)
    rank = load_run(run).ranks[0]
    assert rank.steps == (INIT_STEP, 1)
    found = [(record.key.step, record.key.fqn) for record in rank.records]
    assert found == [(-1, "early"), (-1, "late"), (-1, "number"), (1, "early"), (1, "number")]


@pytest.mark.parametrize("value", [1.25, -0.0, math.inf, math.nan, 7, True])
def test_numbers_keep_their_bits(recorder_of, value):
    run, recorder = recorder_of("capture.level=fingerprint")
    recorder.begin_step(0)
    note_number(recorder, key(0), value)
    see(recorder, key(0), torch.tensor(float(value), dtype=torch.float64))
    recorder.end_step()
    number, tensor = load_run(run).ranks[0].records
    assert (number.shape, number.dtype, number.layout) == ((), "float64", None)
    assert number.digest.fingerprint == tensor.digest.fingerprint
    assert str(number.value) == str(float(value) + 0.0)


def test_bytes(recorder_of):
    run, recorder = recorder_of("capture.level=tensor")
    note_bytes(recorder, key(INIT_STEP, "rng", Role.RNG, slot="python"), b"\x00\x01\xff")
    recorder.end_step()
    rank = load_run(run).ranks[0]
    (record,) = rank.records
    assert (record.shape, record.dtype, record.layout) == ((3,), "uint8", None)
    assert rank.payload(record).bits.tolist() == [0, 1, 255]


def test_what_cannot_be_recorded_is_said_and_does_not_stop_the_training(recorder_of):
    run, recorder = recorder_of()
    recorder.begin_step(4)
    see(recorder, key(4, "ok"), torch.ones(2))
    see(recorder, key(4, "sparse"), torch.eye(2).to_sparse())
    see(recorder, key(4, "none"), None)
    note_number(recorder, key(4, "huge"), 10**400)
    recorder.end_step()
    recorder.close(complete=True)
    loaded = load_run(run)
    assert [record.key.fqn for record in loaded.ranks[0].records] == ["ok"]
    assert len(loaded.notes) == 3
    assert any("sparse" in note and "1 records could not be taken" in note for note in loaded.notes)


def test_a_device_that_fails_at_the_end_loses_the_tensors_and_says_so(recorder_of, monkeypatch):
    backend = load_backend("torch")
    monkeypatch.setattr(backend, "finish_digests", lambda handles: 1 / 0, raising=True)
    run, recorder = recorder_of(backend=backend)
    recorder.begin_step(0)
    see(recorder, key(0), torch.ones(2))
    note_number(recorder, key(0, "number"), 3)
    recorder.end_step()
    loaded = load_run(run)
    assert [record.key.fqn for record in loaded.ranks[0].records] == ["number"]
    assert any("1 tensor of step 0" in note for note in loaded.notes)


@pytest.mark.parametrize("level", ["statistics", "sketch", "tensor"])
def test_no_reference_to_the_live_tensor_is_kept(recorder_of, level):
    _, recorder = recorder_of(f"capture.level={level}")
    tensor = torch.ones(3)
    alive, memory = weakref.ref(tensor), tensor.untyped_storage()._weak_ref()
    see(recorder, key(INIT_STEP), tensor)
    del tensor
    gc.collect()
    assert alive() is None
    assert torch.UntypedStorage._expired(memory)
    torch.UntypedStorage._free_weak_ref(memory)


def test_close_after_a_crash_keeps_the_error_of_the_training(recorder_of):
    run, recorder = recorder_of()
    recorder.begin_step(0)
    recorder.end_step()
    recorder.begin_step(1)
    see(recorder, key(1), torch.ones(2))

    def train():
        try:
            raise ZeroDivisionError("the user's")
        finally:
            recorder.close(complete=False)

    with pytest.raises(ZeroDivisionError, match="the user's"):
        train()
    loaded = load_run(run)
    assert loaded.ranks[0].steps == (0,)
    assert not loaded.ranks[0].complete
    assert any("did not end as planned" in note for note in loaded.notes)


def test_the_records_of_a_step_that_failed_are_kept_apart(recorder_of):
    out, recorder = recorder_of()
    recorder.begin_step(0)
    see(recorder, key(0), torch.ones(3))
    recorder.end_step()
    recorder.begin_step(1)
    see(recorder, key(1), torch.tensor([1.0, float("nan")]))
    recorder.close(complete=False)
    rank = load_run(out).ranks[0]
    assert rank.steps == (0,)
    assert [record.key.step for record in rank.records] == [0]
    assert [record.key.step for record in rank.unfinished] == [1]
    assert rank.unfinished[0].digest.statistics.nans == 1
    assert rank.unfinished[0].payload is None


def test_the_records_of_a_step_that_was_only_begun_are_dropped(recorder_of):
    out, recorder = recorder_of()
    recorder.begin_step(0)
    see(recorder, key(0), torch.ones(3))
    recorder.end_step()
    recorder.begin_step(1)
    see(recorder, key(1), torch.ones(3))
    recorder.close(complete=True)
    assert not load_run(out).ranks[0].unfinished


def test_a_device_that_never_answers_does_not_hold_up_a_failed_training(recorder_of, monkeypatch):
    """As it does while a collective waits for a rank that is gone."""
    out, recorder = recorder_of()
    monkeypatch.setattr("mindspeed_precision.record.recorder._PATIENCE", 0.05)
    never = threading.Event()

    def finish(pending):
        never.wait()
        return []

    monkeypatch.setattr(recorder, "_finish", finish)
    recorder.begin_step(0)
    see(recorder, key(0), torch.ones(3))
    recorder.close(complete=False)
    never.set()
    rank = load_run(out).ranks[0]
    assert not rank.unfinished
    assert not rank.complete
