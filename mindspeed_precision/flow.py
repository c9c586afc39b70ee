"""Two run directories in, one diagnosis out: the offline half, as one reads it."""

from __future__ import annotations

from pathlib import Path

from mindspeed_precision.align import align
from mindspeed_precision.compare import DEFAULT_POLICY, Policy, load_policy
from mindspeed_precision.diagnose import conclude, find_causes, gather_facts, prove_by_replay
from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.records import Diagnosis


def compare_runs(
    baseline: str | Path | Run,
    candidate: str | Path | Run,
    *,
    policy: str | Policy = DEFAULT_POLICY,
    replay: bool = True,
) -> Diagnosis:
    """Compare two runs, and say where and why they first differ.

    Args:
        baseline: run directory, or a run that was loaded; the one to agree with.
        candidate: the same, of the run that is examined.
        policy: what counts as aligned; a name (``exact``), a YAML file, or a loaded policy.
        replay: recompute a divergent dW from its captured operands, where torch is installed.

    Returns:
        The diagnosis; nothing is written.

    Raises:
        DumpError: a run cannot be read.
        IncomparableError: the runs do not answer the same question.
        ConfigError: there is no such policy.
    """
    chosen = policy if isinstance(policy, Policy) else load_policy(policy)
    one = baseline if isinstance(baseline, Run) else load_run(baseline)
    two = candidate if isinstance(candidate, Run) else load_run(candidate)
    facts = gather_facts(one, two, align(one, two), policy=chosen)
    findings = find_causes(facts)
    if replay:
        findings = prove_by_replay(facts, findings)
    return conclude(facts, findings)
