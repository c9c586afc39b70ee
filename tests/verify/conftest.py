"""What the tests of ``verify`` share: two fake runs, and the findings about them by id."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_precision.dump.format import MANIFEST
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.testing.celled import in_cells, left_out, said
from mindspeed_precision.testing.fake_runs import FakeRun, plant, write_fake_run
from mindspeed_precision.verify import check
from mindspeed_precision.verify.verify import verify_runs

ARGUMENTS = {
    "train_iters": 20,
    "lr": 0.01,
    "min_lr": 0.001,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "data_path": ["corpus"],
    "log_interval": 10,
    "adam_beta2": 0.95,
}


UNREAD = [plant(phase=p, drop=True) for p in ("fprop", "dgrad", "wgrad", "accumulate", "reduce", "clip")]
"""What ``verify`` does not read is computed and not recorded: most of a fake run's time is its records."""


@pytest.fixture(autouse=True)
def asked_in_parts(monkeypatch):
    """Ask every run of several ranks that a test checks in parts, too: the answer must be the same."""
    in_memory = check._in_memory

    def both(run, *told):
        answer = in_memory(run, *told)
        if len(run.ranks) > 1 and is_run(run.path) and not told and load_run(run.path) == run:
            found = in_cells(run.path)
            but = left_out(found)  # the run is one replica, and larger than memory
            assert said(found, but=but) == said(answer, but=but)
        return answer

    monkeypatch.setattr(check, "_in_memory", both)


def is_run(path):
    """Tell whether it is the directory of a run that was not restarted."""
    return (path / MANIFEST).is_file() and not check.why_not(path)


@pytest.fixture
def verify(tmp_path):
    """Return a function: changes of the baseline and of the candidate in, findings by id out.

    The last answer is its ``answer``, what a check looked at ``outcome(name)``.
    """

    def run(baseline=None, candidate=None, *, both=None, **options):
        common = FakeRun(megatron_args=ARGUMENTS, **(both or {}))
        sides = []
        for name, given in (("baseline", baseline or {}), ("candidate", candidate or {})):
            changes = {key: value for key, value in given.items() if key != "arguments"}
            arguments = {**ARGUMENTS, **given.get("arguments", {})}
            plants = [*changes.pop("plants", ()), *UNREAD]
            fake = replace(common, megatron_args=arguments, plants=plants, **changes)
            sides.append(write_fake_run(tmp_path / name, fake))
        answer = verify_runs(*sides, **options)
        run.answer = answer
        found = {}
        for finding in answer.findings:
            found.setdefault(finding.id, []).append(finding)
        return found

    run.outcome = lambda name: next(one for one in run.answer.outcomes if one.name == name)
    return run
