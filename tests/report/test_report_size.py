"""A thousand steps of two thousand tensors: how large the page is, and how long it takes to write."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_precision.dump.collection import no_collection
from mindspeed_precision.records import (
    Comparison,
    Diagnosis,
    Digest,
    Layout,
    Pair,
    Phase,
    RecordKey,
    Role,
    Statistics,
    StepScalars,
    TensorRecord,
    Verdict,
)
from mindspeed_precision.report.facts import report_facts
from mindspeed_precision.report.html import report_html

KINDS = (
    (Phase.FPROP, Role.OUTPUT),
    (Phase.DGRAD, Role.GRAD_INPUT),
    (Phase.WGRAD, Role.WGRAD),
    (Phase.OPTIMIZER, Role.PARAM),
)


DIGESTS = 512


def digests() -> list[Digest]:
    """Return digests with histograms of their own: what a page cannot pack well."""
    bits = np.random.default_rng(2).integers(0, 2**63, (DIGESTS, 25)).tolist()
    return [
        Digest(
            fingerprint=own[0],
            unordered=1,
            statistics=Statistics(
                minimum=-own[1] / 2**63,
                maximum=own[2] / 2**63,
                mean=own[3] / 2**73,
                l2_norm=own[4] / 2**60,
                zeros=own[5] % 9,
                nans=0,
                infs=0,
                exponents={100 + n: own[n] % 10_000 for n in range(25)},
            ),
        )
        for own in bits
    ]


def synthetic(steps: int, tensors: int) -> list[Comparison]:
    """Return comparisons with errors drawn at random: the worst case for packing."""
    draw = np.random.default_rng(0)
    errors = (10.0 ** draw.uniform(-9, 3, (steps, tensors))).tolist()
    known, layout, same = digests(), Layout(stride=(512, 1)), {"bitwise": True}
    found = []
    for step in range(steps):
        for tensor, error in enumerate(errors[step]):
            phase, role = KINDS[tensor % len(KINDS)]
            fqn = f"decoder.layers.{tensor // 40}.block{tensor // len(KINDS) % 10}.linear"
            key = RecordKey(step=step, microbatch=0, phase=phase, fqn=fqn, role=role)
            one, two = (
                TensorRecord(
                    seq=step * tensors + tensor,
                    key=key,
                    shape=(1024, 512),
                    dtype="bfloat16",
                    layout=layout,
                    digest=known[(step * 7 + tensor + side) % DIGESTS],
                )
                for side in (0, 1)
            )
            metrics = {"bitwise": False, "rel_frobenius": error * 2.0**-8, "tolerances": error}
            verdict = Verdict.DIVERGED if error > 1 else Verdict.WITHIN_TOLERANCE
            if error < 1e-8:
                two, metrics, verdict = one, same, Verdict.IDENTICAL
            pair = Pair(rank=0, baseline=one, candidate=two)
            found.append(Comparison(pair=pair, verdict=verdict, metrics=metrics, reason="bits differ"))
    return found


def diagnosis_of(base: Diagnosis, steps: int, tensors: int) -> Diagnosis:
    loss = np.random.default_rng(1).normal(5, 1, (4, steps))
    scalars = tuple(
        StepScalars(step=n, baseline_loss=a, candidate_loss=b, baseline_grad_norm=c, candidate_grad_norm=d)
        for n, (a, b, c, d) in enumerate(loss.T.tolist())
    )
    with no_collection():
        found = synthetic(steps, tensors)
    return replace(base, comparisons=tuple(found), scalars=scalars, steps=tuple(range(steps)), origins=())


def measured(diagnosis: Diagnosis) -> tuple[int, float, str]:
    begin = time.process_time()
    page = report_html(report_facts(diagnosis))
    return len(page.encode()), time.process_time() - begin, page


def test_sixty_steps_of_four_hundred_tensors(make_report):
    size, seconds, page = measured(diagnosis_of(make_report("diverged").diagnosis, 60, 400))
    assert size < 2_000_000
    assert seconds < 30
    assert '"size":[400,60]' in page


@pytest.mark.parametrize(
    ("steps", "tensors"),
    [
        pytest.param(200, 1000, marks=pytest.mark.matrix),
        pytest.param(1000, 2000, marks=pytest.mark.long),
    ],
)
def test_a_long_run_of_many_tensors(steps, tensors, make_report, capsys):
    size, seconds, page = measured(diagnosis_of(make_report("diverged").diagnosis, steps, tensors))
    with capsys.disabled():
        sys.stdout.write(
            f"\n{steps} steps x {tensors} tensors: {size / 1e6:.2f} MB, {seconds:.0f} s of CPU\n"
        )
    assert size < 2_000_000
    assert seconds < 180
    assert f'"size":[{tensors},{steps}]' in page
