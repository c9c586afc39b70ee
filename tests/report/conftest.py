"""Pairs of runs that reports are made of, each written, compared and reported once."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.flow import compare_in_full
from mindspeed_precision.records import Diagnosis, Level
from mindspeed_precision.report.facts import ReportFacts, report_facts
from mindspeed_precision.report.files import write_files
from mindspeed_precision.testing.fake_runs import (
    LINEAR,
    constant,
    nudged,
    plant,
    rounded,
    transposed_layout,
    write_fake_run,
)

HOSTILE = (
    "</script><script>window.pwned=1</script>.\u202eevil\u2066.`|[x](http://y.z)@all #1.名前.مرحبا."
    + "l" * 300
)
"""A module's name that tries to break out of everything a report is made of."""


@dataclass(frozen=True)
class Reported:
    """A pair of runs and its report."""

    diagnosis: Diagnosis
    facts: ReportFacts
    directory: Path

    @property
    def page(self) -> Path:
        return self.directory / "report.html"

    @property
    def url(self) -> str:
        return self.page.as_uri()


def reported(directory: Path, one: Path, two: Path, **how) -> Reported:
    compared = compare_in_full(one, two, replay=False, **how)
    facts = report_facts(compared.diagnosis, compared.runs, compared.mappings)
    write_files(compared.diagnosis, directory / "compare", facts=facts)
    return Reported(compared.diagnosis, facts, directory / "compare")


DW = plant(phase="wgrad", role="wgrad", fqn=LINEAR, step=1, microbatch=0, value=nudged(3))
LAYOUT = plant(phase="wgrad", role="grad_output", fqn=LINEAR, layout=transposed_layout)
ROUNDED = plant(phase="fprop", role="output", fqn=LINEAR, value=rounded())
NAN = plant(phase="fprop", role="output", fqn="output_layer", step=2, microbatch=1, value=constant(np.nan))
NO_LOSS = (plant(role="loss", drop=True), plant(role="grad_norm", drop=True))

CASES = {
    "diverged": (
        {"steps": 6, "level": Level.TENSOR},
        {"plants": [DW, LAYOUT], "megatron_args": {"lr_warmup_iters": 10, "<b>": "</script>"}},
        {},
    ),
    "healthy": ({"steps": 4}, {}, {}),
    "tolerated": (
        {"steps": 5, "level": Level.SKETCH},
        {"plants": [ROUNDED], "undecayed": frozenset([f"{LINEAR}.bias"])},
        {"policy": "cross_framework"},
    ),
    "nan": ({"steps": 4}, {"plants": [NAN]}, {}),
    "one_step": (
        {"steps": 1, "level": Level.FINGERPRINT},
        {"plants": [replace(DW, where=lambda _, key: key.fqn == LINEAR)]},
        {},
    ),
    "no_loss": ({"steps": 2, "plants": NO_LOSS}, {}, {}),
    "layouts": ({"ranks": 1, "microbatches": 2}, {"ranks": 2, "microbatches": 1}, {}),
    "longer": ({"steps": 3}, {"steps": 6}, {}),
    "frozen": ({}, {"frozen": frozenset([f"{LINEAR}.weight"])}, {}),
    "not_certified": ({"lr": 0.0}, {}, {}),
}


@pytest.fixture(scope="session")
def make_report(tmp_path_factory):
    """Return a function that gives the report of a case, made when it is asked for first."""
    made: dict[str, Reported] = {}

    def make(name: str) -> Reported:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            if name == "hostile":
                runs = hostile_runs(directory)
                how = {}
            else:
                shape, fault, how = CASES[name]
                runs = (
                    write_fake_run(directory / "baseline", **shape),
                    write_fake_run(directory / "candidate", **{**shape, **fault}),
                )
            made[name] = reported(directory, *runs, **how)
        return made[name]

    return make


def hostile_runs(directory: Path) -> tuple[Path, Path]:
    """Write a pair whose modules, labels and arguments have hostile names: anyone may write a run."""
    name = "candidate </title><script>window.pwned=2</script>"
    said = {"label": HOSTILE, "framework": {"name": "<img src=x onerror=window.pwned=3>", "version": "1"}}
    one = write_fake_run(directory / "baseline", manifest=said)
    two = write_fake_run(directory / "two", plants=[DW], manifest=said, megatron_args={HOSTILE: "`|`"})
    shutil.move(two, directory / name)
    for run in (one, directory / name):
        for path in (run / "rank00000").glob("*"):
            if path.suffix in (".jsonl", ".json"):
                escaped = json.dumps(HOSTILE.replace(".", "·"))[1:-1]
                path.write_text(path.read_text("utf-8").replace("linear_fc1", escaped), "utf-8")
        (run / "rank00000" / "COMPLETE").unlink()
        load_run(run)
    return one, directory / name
