"""A run directory as one side: by its elements where it kept them, else by its fingerprints."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import hosts

from mindspeed_precision.ckpt import open_checkpoint
from mindspeed_precision.dump.payload import write_payload
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.records import Level, Severity
from mindspeed_precision.report.examination import examination_status
from mindspeed_precision.testing.fake_runs import write_fake_run

LEVELS = ["fingerprint", "statistics", "tensor"]
WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return {level: write_fake_run(directory / level, level=Level(level)) for level in LEVELS}


@pytest.fixture(scope="module")
def values(runs):
    tensors = open_checkpoint(runs["tensor"]).tensors
    return {name: np.ascontiguousarray(one.bits()).view("<f4").copy() for name, one in tensors.items()}


@pytest.fixture
def saved(tmp_path):
    def save(values, dtype="float32"):
        write_payload(tmp_path / f"{dtype}.safetensors", hosts(values, dtype))
        return tmp_path / f"{dtype}.safetensors"

    return save


@pytest.mark.parametrize("level", LEVELS)
def test_the_checkpoint_that_a_run_began_with(level, runs, values, saved, answer):
    examination, findings, outcomes = answer(runs[level], saved(values))
    assert {one["outcome"] for one in outcomes.values()} == {"identical"}
    assert findings == {}
    assert examination_status(examination)[0] == 0
    kept = any("kept digests alone" in note for note in examination.notes)
    assert kept is (level != "tensor")


@pytest.mark.parametrize("level", LEVELS)
def test_another_checkpoint(level, runs, values, saved, answer):
    other = {**values, WEIGHT: values[WEIGHT].copy()}
    other[WEIGHT][2, 3] += 1
    examination, findings, outcomes = answer(runs[level], saved(other))
    assert [name for name, one in outcomes.items() if one["outcome"] != "identical"] == [WEIGHT]
    assert findings["weights.differs"].severity is Severity.ERROR
    assert examination_status(examination)[0] == 1
    if level == "tensor":
        assert outcomes[WEIGHT]["rows"] == [2]
    else:
        assert "no elements were kept" in outcomes[WEIGHT]["detail"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_in_another_dtype(level, runs, values, saved, answer):
    examination, findings, outcomes = answer(saved(values, "bfloat16"), runs[level])
    if level == "fingerprint":
        assert {one["outcome"] for one in outcomes.values()} == {"not read"}
        assert "only a fingerprint was recorded" in outcomes[WEIGHT]["detail"]
        assert findings["coverage.not_compared"].severity is Severity.ERROR
        assert examination.headline.startswith("NO ANSWER")
        assert examination_status(examination)[0] == 1
    else:
        assert {one["outcome"] for one in outcomes.values()} == {"same after"}
        assert set(findings) == {"weights.cast"}
        assert examination_status(examination)[0] == 0


def test_a_run_in_bfloat16_and_the_float32_that_it_loaded(values, saved):
    """What a mixed-precision run recorded of its parameters, by fingerprint, is the checkpoint rounded."""
    from mindspeed_precision.ckpt.difference import tell
    from mindspeed_precision.ckpt.stored import Geometry, Stored
    from mindspeed_precision.record.statistics import digest_host
    from mindspeed_precision.records import INIT_STEP, Phase, RecordKey, Role, TensorRecord

    rounded = hosts({WEIGHT: values[WEIGHT]}, "bfloat16")[WEIGHT]
    key = RecordKey(step=INIT_STEP, phase=Phase.INIT, fqn=WEIGHT, role=Role.PARAM)
    shape = values[WEIGHT].shape
    digest = digest_host(rounded, statistics=False)
    record = TensorRecord(seq=0, key=key, shape=shape, dtype="bfloat16", layout=None, digest=digest)
    run = Stored(name=WEIGHT, shape=shape, dtype="bfloat16", source="run", load=None, record=record)
    file = open_checkpoint(saved(values)).tensors[WEIGHT]
    assert tell(WEIGHT, file, run, geometry=Geometry()).steps.keys() == {"cast"}
    other = file.changed(lambda bits: bits[::-1], shape)
    assert not tell(WEIGHT, other, run, geometry=Geometry()).same


def test_a_run_without_initial_parameters(tmp_path):
    run = write_fake_run(tmp_path / "run")
    index = run / "rank00000" / "index.jsonl"
    assert '"phase":"init"' in index.read_text()
    index.write_text(index.read_text().replace('"role":"param"', '"role":"input"'))
    (run / "rank00000" / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="recorded no initial parameters"):
        open_checkpoint(run)
