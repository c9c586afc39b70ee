"""What the tests of ``verify`` share: two fake runs, and the findings about them by id."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_precision.testing.fake_runs import FakeRun, plant, write_fake_run
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
