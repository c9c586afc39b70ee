"""An optimizer that moves nothing at lr > 0: named in one run and in both, unless it had nothing to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.compare.movement import movement_of
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.flow import compare_runs
from mindspeed_precision.record.elements import to_bits
from mindspeed_precision.record.statistics import digest_host, digest_number
from mindspeed_precision.records import (
    INIT_STEP,
    Layout,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    Severity,
    TensorRecord,
    Verdict,
)
from mindspeed_precision.report.exit_status import exit_status
from mindspeed_precision.testing.fake_runs import (
    EMBEDDING,
    HEAD,
    LINEAR,
    constant,
    plant,
    scaled,
    write_fake_run,
)

WEIGHT = f"{LINEAR}.weight"
EVERY = frozenset(
    f"{module}.{kind}"
    for module, kinds in (
        (EMBEDDING, ("weight",)),
        (LINEAR.replace("1", "0", 1), ("weight", "bias")),
        (LINEAR, ("weight", "bias")),
        (HEAD, ("weight",)),
    )
    for kind in kinds
)


def both(directory, shape, **candidate):
    one = write_fake_run(directory / "baseline", **shape)
    return compare_runs(one, write_fake_run(directory / "candidate", **{**shape, **candidate}))


def test_optimizer_that_writes_nothing_is_named_and_is_the_one_cause(tmp_path):
    diagnosis = both(tmp_path, {}, unwritten=EVERY)
    assert diagnosis.first_divergence.key.phase is Phase.OPTIMIZER
    (finding,) = diagnosis.findings
    assert (finding.id, finding.severity) == ("optimizer.parameters_unmoved", Severity.ERROR)
    assert set(finding.explains) == {origin.key for origin in diagnosis.origins}
    assert "in the candidate: all of 12 updates of a parameter changed nothing" in finding.evidence
    assert finding.remedy.startswith("the candidate: look whether the optimizer writes")


def test_one_parameter_that_is_not_written_is_told_from_those_that_are(tmp_path):
    diagnosis = both(tmp_path, {}, unwritten=frozenset({WEIGHT}))
    (finding,) = diagnosis.findings
    assert finding.id == "optimizer.parameters_unmoved"
    assert finding.title.endswith(f"in the candidate: {WEIGHT}")
    assert "in the candidate: 2 of 12 updates of a parameter changed nothing" in finding.evidence
    assert finding.where.describe() == f"step 0: {WEIGHT} param in optimizer"
    assert [origin.key.fqn for origin in diagnosis.origins] == [WEIGHT]


def test_the_baseline_may_be_the_idle_side(tmp_path):
    diagnosis = both(tmp_path, {"unwritten": EVERY}, unwritten=frozenset())
    (finding,) = diagnosis.findings
    assert "in the baseline" in finding.title


def test_two_idle_optimizers_are_not_certified(tmp_path):
    diagnosis = both(tmp_path, {"unwritten": EVERY})
    assert (diagnosis.status, diagnosis.origins) == (Verdict.MISSING, ())
    (finding,) = diagnosis.findings
    assert finding.id == "optimizer.parameters_unmoved"
    assert "in both runs" in finding.title
    assert "agreement here would prove nothing" in finding.evidence
    assert exit_status(diagnosis)[0] == 1


def test_what_is_nan_already_cannot_move_and_is_no_finding(tmp_path):
    """The same update of the same run: an optimizer that writes nothing, of numbers and of NaN."""
    found = {}
    for name, number in (("numbers", 1.0), ("nan", np.nan)):
        plants = [plant(role="param", fqn=WEIGHT, value=constant(number))]
        run = load_run(write_fake_run(tmp_path / name, unwritten=EVERY, plants=plants))
        found[name] = {one.key.fqn for one in movement_of(run, [0], range(2)).unmoved}
    assert found["numbers"] - found["nan"] == {WEIGHT}


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"frozen": frozenset({WEIGHT})},
        {"lr": 0.0},
        {"plants": [plant(role="hyperparameter", slot="lr", step=0, value=constant(0))]},
        {  # zero gradient without weight decay: nothing to do for this one
            "weight_decay": 0.0,
            "plants": [
                plant(phase=p, fqn=f"{LINEAR}*", value=scaled(0)) for p in ("wgrad", "reduce", "clip")
            ],
        },
        {"plants": [plant(phase="optimizer", role="hyperparameter", drop=True)], "unwritten": EVERY},
    ],
    ids=["healthy", "frozen", "lr 0", "warm-up", "zero gradient", "skipped"],
)
def test_what_has_nothing_to_move_is_no_finding(shape, tmp_path):
    diagnosis = both(tmp_path, shape)
    assert "optimizer.parameters_unmoved" not in {finding.id for finding in diagnosis.findings}


# types of 16 bits and master parameters


@dataclass(frozen=True)
class Step:
    """What one step of an optimizer leaves of one parameter ``p``."""

    param: float
    master: float | None = None


def write_steps(directory, first, steps, *, lr, dtype="bfloat16", adam=True, gradient=1e-3, statistics=True):
    create_run(directory, {"parallel": RankCoordinates().sizes()})
    writer = RankWriter(directory, coordinates=RankCoordinates())
    writer.declare_parameters([ParameterDeclaration(fqn="p", shape=(4,), dtype=dtype, trainable=True)])
    records = []

    def see(step, role, value, *, phase=Phase.OPTIMIZER, kind=dtype, slot=""):
        bits = to_bits(np.full(4, value, np.float32), kind)
        records.append(
            TensorRecord(
                seq=see.seq,
                key=RecordKey(step=step, phase=phase, fqn="p", role=role, slot=slot),
                shape=(4,),
                dtype=kind,
                layout=Layout(stride=(1,)),
                digest=digest_host(HostTensor(bits=bits, dtype=kind), statistics=statistics),
            )
        )
        see.seq += 1

    def number(step, slot, value):
        key = RecordKey(step=step, phase=Phase.OPTIMIZER, fqn="p", role=Role.HYPERPARAMETER, slot=slot)
        records.append(
            TensorRecord(
                seq=see.seq, key=key, shape=(), dtype="float64", layout=None, digest=digest_number(value)
            )
        )
        see.seq += 1

    see.seq = 0
    see(INIT_STEP, Role.PARAM, first, phase=Phase.INIT)
    writer.write_step(INIT_STEP, records, {}, microbatches=0)
    for index, step in enumerate(steps):
        records.clear()
        see(index, Role.MAIN_GRAD, gradient, phase=Phase.CLIP, kind="float32", slot="clipped")
        number(index, "lr", lr)
        if adam:
            number(index, "beta1", 0.9)
            number(index, "eps", 1e-8)
        if step.master is not None:
            see(index, Role.MASTER_PARAM, step.master, kind="float32")
        see(index, Role.PARAM, step.param)
        writer.write_step(index, records, {}, microbatches=1)
    writer.close(complete=True)
    return directory


def movement(directory, *args, **kwargs):
    write_steps(directory / "run", *args, **kwargs)
    return movement_of(load_run(directory / "run"), (0,), range(len(args[1])))


def test_a_bf16_parameter_may_round_a_small_update_away(tmp_path):
    """Half an ulp of 1.0 in bf16 is 2^-8: lr 1e-5 cannot be seen there."""
    seen = movement(tmp_path, 1.0, [Step(1.0), Step(1.0)], lr=1e-5)
    assert (seen.moved, len(seen.unmoved), seen.failed) == (0, 2, ())


def test_a_bf16_parameter_cannot_round_a_large_update_away(tmp_path):
    assert len(movement(tmp_path, 0.01, [Step(0.01)], lr=0.1).failed) == 1


def test_the_master_parameter_decides_where_there_is_one(tmp_path):
    moves = [Step(1.0, master=1.0 - 1e-5), Step(1.0, master=1.0 - 2e-5)]
    seen = movement(tmp_path / "moves", 1.0, moves, lr=1e-5)
    assert (seen.moved, len(seen.unmoved), seen.failed) == (1, 1, ())  # step 0 has no master before it
    still = movement(tmp_path / "still", 1.0, [Step(1.0, master=1.0)] * 2, lr=1e-3)
    assert [(one.key.role, one.key.step) for one in still.failed] == [(Role.MASTER_PARAM, 1)]


@pytest.mark.parametrize(("adam", "failed"), [(True, 1), (False, 0)])
def test_without_adam_the_gradient_bounds_the_update(adam, failed, tmp_path):
    """lr × gradient, 5e-8, is less than half an ulp of 1.0 in float32; Adam moves by about lr."""
    seen = movement(tmp_path, 1.0, [Step(1.0)], lr=5e-5, dtype="float32", adam=adam)
    assert len(seen.failed) == failed


def test_what_rounding_may_explain_is_a_warning_where_nothing_moved(tmp_path):
    one = write_steps(tmp_path / "a", 1.0, [Step(1.0)], lr=1e-5)
    diagnosis = compare_runs(one, write_steps(tmp_path / "b", 1.0, [Step(1.0)], lr=1e-5))
    finding = next(f for f in diagnosis.findings if f.id == "optimizer.parameters_unmoved")
    assert finding.severity is Severity.WARNING
    assert diagnosis.status is Verdict.MISSING


@pytest.mark.parametrize(("gradient", "failed"), [(1e-3, 1), (0.0, 0)])
def test_fingerprints_alone_tell_a_gradient_of_zeros(gradient, failed, tmp_path):
    steps = [Step(1.0)]
    seen = movement(tmp_path, 1.0, steps, lr=1e-3, dtype="float32", gradient=gradient, statistics=False)
    assert len(seen.failed) == len(seen.unmoved) == failed
