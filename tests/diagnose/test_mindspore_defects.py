"""The defects of the MindSpore that is installed, in runs of the native twin: named, proved, and cured."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Phase, Role, Severity, Verdict

mindspore = pytest.importorskip("mindspore")
pytestmark = pytest.mark.mindspore

SPLIT_IS_WRONG = (2, 8) <= tuple(int(part) for part in mindspore.__version__.split(".")[:2]) <= (2, 10)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Return a function that trains a recorded twin in a process of its own, once per variant."""

    @cache
    def train(*words):
        out = tmp_path_factory.mktemp("twin") / "run"
        command = [sys.executable, "-m", "mindspeed_precision.testing.twin", *words,
                   "--steps", "2", "--microbatches", "3", "--hidden", "32", "--seq-length", "16",
                   "--precision-debug-out", str(out)]  # fmt: skip
        if "--precision-debug-set" not in words:
            command += ["--precision-debug-set", "capture.level=tensor"]
        environment = {**os.environ, "PYTHONHASHSEED": "1234", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return out

    return train


def computed(diagnosis):
    """Return the origins that are numbers of the training, which draws none from the generator."""
    return [origin for origin in diagnosis.origins if origin.key.role is not Role.RNG]


def errors(diagnosis):
    return [finding for finding in diagnosis.findings if finding.severity is Severity.ERROR]


def test_accumulation_of_a_transposed_dw_is_proved_wrong(twin):
    diagnosis = compare_runs(twin(), twin("--wgrad", "transposed"))
    first = diagnosis.first_divergence.key
    assert (first.step, first.microbatch, first.phase) == (0, 1, Phase.ACCUMULATE)
    (finding,) = errors(diagnosis)
    assert (finding.id, finding.proved_by_replay) == ("layout.noncontiguous_accumulate", True)
    assert finding.title.endswith("; the candidate is wrong")
    assert finding.replay.baseline_error < 1e-6 < 0.5 < finding.replay.candidate_error
    assert {origin.key for origin in diagnosis.origins} == set(finding.explains)


def test_transposed_dw_without_the_tape_is_added_rightly(twin):
    one, two = (
        twin("--gradients", "value_and_grad"),
        twin("--gradients", "value_and_grad", "--wgrad", "transposed"),
    )
    diagnosis = compare_runs(one, two)
    assert (errors(diagnosis), computed(diagnosis)) == ([], [])


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_split_is_proved_wrong_where_it_is(positions, twin):
    kind = ("--positions", positions)
    diagnosis = compare_runs(twin(*kind), twin(*kind, "--split", "split"))
    if not SPLIT_IS_WRONG:
        assert (errors(diagnosis), computed(diagnosis)) == ([], [])
        return
    first = diagnosis.first_divergence.key
    assert (first.phase, first.role) == (Phase.DGRAD, Role.GRAD_OUTPUT)
    assert first.fqn == "decoder.layers.1.self_attention.linear_qkv"
    (finding,) = errors(diagnosis)
    assert (finding.id, finding.proved_by_replay) == ("layout.noncontiguous_grad", True)
    assert finding.title.endswith("; the candidate is wrong")
    assert finding.replay.baseline_error == 0 < 0.5 < finding.replay.candidate_error


def test_the_remedy_for_split_gives_the_bits_of_chunk(twin):
    settings = ("--precision-debug-set", "capture.level=tensor", "remedies=[split_by_slices]")
    diagnosis = compare_runs(twin("--positions", "rope"), twin("--split", "split", *settings))
    assert (errors(diagnosis), computed(diagnosis)) == ([], [])


@pytest.mark.parametrize("optimizer", ["adamw", "mint.sgd"])
def test_an_optimizer_that_does_nothing_certifies_nothing(optimizer, twin):
    run = twin("--optimizer", optimizer)
    diagnosis = compare_runs(run, run)
    if optimizer == "adamw":
        assert (diagnosis.status, errors(diagnosis)) == (Verdict.IDENTICAL, [])
        return
    (finding,) = errors(diagnosis)
    assert finding.id == "optimizer.parameters_unmoved"
    assert diagnosis.status is Verdict.MISSING


def test_the_remedy_for_dw_acts_on_tensors_of_mindspore():
    from mindspeed_precision.patching.remedies import wgrad_contiguous

    class Context:
        gradient_accumulation_fusion = False

    wgrad = mindspore.Tensor(np.arange(12, dtype=np.float32).reshape(3, 4)).t()
    got = wgrad_contiguous(lambda ctx, grad: (grad, wgrad, None), None, (Context(), wgrad), {})[1]
    assert (wgrad.is_contiguous(), got.is_contiguous(), list(got.stride())) == (False, True, [3, 1])
    assert (got.asnumpy() == wgrad.asnumpy()).all()
