"""Prove a cause: recompute what a finding is about, and see which recipe gives which run bit for bit.

One module per kind of operation: ``replay_gemm`` (dW, in a process with torch), ``replay_accumulate`` (the
sum of gradients) and ``replay_concatenate`` (what only moves numbers), these two in numpy, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.diagnose.recipes import gives
from mindspeed_precision.diagnose.replay_accumulate import replay_accumulation
from mindspeed_precision.diagnose.replay_concatenate import replay_concatenation
from mindspeed_precision.diagnose.replay_gemm import replay_gemm
from mindspeed_precision.diagnose.rules.gradients import another_sum
from mindspeed_precision.diagnose.rules.layouts import WRONG_SIDE
from mindspeed_precision.errors import DumpError, ReplayError
from mindspeed_precision.progress import Progress, silent, watched
from mindspeed_precision.records import Finding, Replay, Side

REPLAYS: Mapping[str, Callable[[Facts, Finding], Replay]] = {
    "wgrad.operand_layout": replay_gemm,
    "wgrad.value": replay_gemm,
    "layout.noncontiguous_accumulate": replay_accumulation,
    "layout.noncontiguous_grad": replay_concatenation,
}
"""What replays the findings of each id; raises ``ReplayError`` where nothing can be replayed."""


def prove_by_replay(facts: Facts, findings: Sequence[Finding], progress: Progress = silent) -> list[Finding]:
    """Replay the first operation that each finding accounts for; the finding says what came of it."""
    provable = watched(
        (finding for finding in findings if finding.id in REPLAYS),
        progress,
        "replaying",
        sum(finding.id in REPLAYS for finding in findings),
    )
    proved = {id(finding): _prove(facts, finding) for finding in provable}
    return [proved.get(id(finding), finding) for finding in findings]


def _prove(facts: Facts, finding: Finding) -> Finding:
    if not any(origin.key == finding.where for origin in facts.origins):
        return finding  # it concerns records of which no elements are known to differ
    try:
        answer = REPLAYS[finding.id](facts, finding)
    except (ReplayError, DumpError) as error:
        evidence = (*finding.evidence, f"not proved by replay: {error.what}")
        remedy = "; ".join(filter(None, (finding.remedy, error.remedy)))
        return replace(finding, evidence=evidence, remedy=remedy)
    if answer.proved:
        proved = replace(
            finding, confidence=max(finding.confidence, 0.99), proved_by_replay=True, replay=answer
        )
        return _blame(proved, answer) if finding.id.startswith("layout.") else proved
    if finding.id == "layout.noncontiguous_accumulate" and answer.complete and not _misread(answer):
        return replace(another_sum(facts, finding.explains), replay=answer)
    wrong = "not proved by replay: the recorded recipes do not give both sides bit for bit"
    if not answer.complete:
        wrong = "not proved by replay: some of what was read lies outside the recorded tensors"
    return replace(finding, evidence=(*finding.evidence, wrong), replay=answer)


def _blame(finding: Finding, answer: Replay) -> Finding:
    """Say which side is wrong: the one that is far from the same operation in float64."""
    wrong = Side.CANDIDATE if answer.candidate_error > answer.baseline_error else Side.BASELINE
    remedy = finding.remedy.replace(WRONG_SIDE, wrong.value, 1)
    return replace(finding, title=f"{finding.title}; the {wrong.value} is wrong", remedy=remedy)


def _misread(answer: Replay) -> bool:
    """Tell whether a recipe that ignores strides gives a side that the right one does not."""
    right, *careless = answer.recipes
    return any(gives(recipe, side) and not gives(right, side) for recipe in careless for side in Side)
