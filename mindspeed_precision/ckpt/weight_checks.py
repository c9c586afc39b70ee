"""Findings about tensors: parameters, what the optimizer keeps, copies, what was not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed_precision.ckpt.difference import PADDED
from mindspeed_precision.ckpt.facts import CKPT, Facts
from mindspeed_precision.ckpt.lines import difference_words
from mindspeed_precision.ckpt.results import TIED, Compared, Outcome, Result
from mindspeed_precision.counting import agree, count
from mindspeed_precision.records import Finding, Severity
from mindspeed_precision.verify.pair.evidence import listed, shortened
from mindspeed_precision.verify.pair.weight_pairs import Way
from mindspeed_precision.verify.registry import Answer

_REMEDIES = {
    "weights.missing": "convert or save the same model; where it merely names them otherwise, say so with "
    "--mapping",
    "weights.other_shape": "build the same model, or convert the checkpoint for this one",
    "weights.transposed": "transpose them in the conversion: Megatron keeps [out, in]",
    "weights.permuted": "give rows the order of the format in the conversion: query, key and value by group "
    "or in blocks, gate and up projection, shards, rotary halves",
    "weights.cast": "convert and save checkpoints in the dtype of the master weights",
    "weights.scaled": "look for a factor in the conversion",
    "weights.other_spread": "one was not loaded from the other: look for a tensor left as initialised",
    "weights.differs": "find which of the two was trained, converted or loaded otherwise; the worst first",
    "optimizer.state": "resume from the same checkpoint with its optimizer, in the same dtype",
}
_TITLES = {
    "weights.missing": "are in one checkpoint only",
    "weights.other_shape": "have another shape",
    "weights.transposed": "are the same but transposed",
    "weights.permuted": "hold the same elements in another order",
    "weights.cast": "are the same but for a cast",
    "weights.scaled": "are a multiple of the baseline's",
    "weights.other_spread": "have other numbers, of another spread",
    "weights.differs": "have other numbers",
}
_OF_STEP = {
    Way.TRANSPOSED: "weights.transposed",
    Way.PERMUTED: "weights.permuted",
    Way.CAST: "weights.cast",
    Way.SCALED: "weights.scaled",
}


@CKPT.register(
    "weights.differs",
    "weights.missing",
    "weights.other_shape",
    "weights.other_spread",
    *_OF_STEP.values(),
    "weights.tied",
    "config.vocabulary_padding",
    holds="every parameter is in both checkpoints and the same",
    unit="parameters",
)
def parameters(facts: Facts) -> Answer:
    """Say which parameters are not the same, and in which way."""
    results = facts.parameters()
    findings = [
        *_absent(facts, results),
        *_finding(
            facts, "weights.other_shape", [one for one in results if one.outcome is Outcome.OTHER_SHAPE]
        ),
        *_finding(facts, "weights.differs", _differing(results, Way.OTHER)),
        *_finding(facts, "weights.other_spread", _differing(results, Way.SPREAD)),
    ]
    for way, id_ in _OF_STEP.items():
        findings += _finding(
            facts, id_, [one for one in results if way in one.steps], _severity(facts.compared, way)
        )
    findings += _tied_and_padded(facts, results)
    looked = [one for one in results if one.outcome is not Outcome.NOT_READ]
    bad = [one for one in looked if _worst_of(facts.compared, one) is Severity.ERROR]
    skipped = "" if looked else "no parameter was found in either checkpoint"
    return Answer(exercised=len(looked), findings=tuple(findings), failed=len(bad), skipped=skipped)


def _differing(results: Sequence[Result], way: Way) -> list[Result]:
    return [one for one in results if one.outcome is Outcome.DIFFERS and one.told and one.told.way is way]


def _severity(compared: Compared, way: Way) -> Callable[[Result], Severity]:
    def of(result: Result) -> Severity:
        one, two = result.pair.one, result.pair.two
        if way is Way.CAST and one is not None and two is not None and one.dtype != two.dtype:
            return Severity.WARNING  # two dtypes were asked for, and the numbers are no other
        if way in (Way.TRANSPOSED, Way.PERMUTED) and not compared.related:
            return Severity.WARNING  # a framework that may keep them so
        return Severity.ERROR

    return of


def _worst_of(compared: Compared, result: Result) -> Severity:
    """Return how bad one parameter is."""
    if result.outcome not in (Outcome.IDENTICAL, Outcome.SAME_AFTER):
        return Severity.ERROR
    steps = [way for way in _OF_STEP if way in result.steps]
    return min(
        (_severity(compared, way)(result) for way in steps), key=list(Severity).index, default=Severity.INFO
    )


def _error(_: Result) -> Severity:
    return Severity.ERROR


def _finding(
    facts: Facts, id_: str, found: Sequence[Result], severity: Callable[[Result], Severity] = _error
) -> list[Finding]:
    if not found:
        return []
    total = len(facts.parameters())
    ordered = sorted(found, key=lambda one: one.badness)
    lines = [f"{one.name}: {difference_words(one, facts.compared)}" for one in ordered]
    names = listed([one.name for one in ordered], 3)
    verb, what = _TITLES[id_].split(" ", 1)
    worst = min((severity(one) for one in found), key=list(Severity).index)
    return [
        Finding(
            id=id_,
            severity=worst,
            confidence=0.95,
            title=f"{len(found)} of {count(total, 'parameter')} {agree(len(found), verb)} {what}: {names}",
            evidence=shortened(lines, 12),
            remedy=_REMEDIES[id_],
        )
    ]


def _absent(facts: Facts, results: Sequence[Result]) -> list[Finding]:
    return _finding(
        facts, "weights.missing", [r for r in results if r.outcome in (Outcome.MISSING, Outcome.EXTRA)]
    )


def _tied_and_padded(facts: Facts, results: Sequence[Result]) -> list[Finding]:
    findings = []
    tied = [one for one in results if TIED in one.steps]
    if tied:
        findings.append(
            Finding(
                id="weights.tied",
                severity=Severity.INFO,
                confidence=0.9,
                title="one checkpoint has twice what the other has once: "
                + listed([one.name for one in tied], 3),
                evidence=tuple(f"{one.name}: {one.detail}" for one in tied),
                remedy="tie them in both, or in none: once they are trained apart they differ",
            )
        )
    padded = [one for one in results if PADDED in one.steps]
    if padded:
        findings.append(
            Finding(
                id="config.vocabulary_padding",
                severity=Severity.WARNING,
                confidence=0.9,
                title=f"the vocabulary is padded otherwise: {padded[0].steps[PADDED]}",
                evidence=tuple(f"{one.name}: {one.steps[PADDED]}" for one in padded),
                remedy="pad both alike (--make-vocab-size-divisible-by times the tensor-parallel size)",
            )
        )
    return findings


@CKPT.register(
    "optimizer.state",
    holds="what the optimizer keeps of every parameter is the same",
    unit="tensors of the optimizer",
)
def optimizer_state(facts: Facts) -> Answer:
    """Say which moments and master parameters are not the same."""
    results = facts.compared.of_role(parameters=False)
    bad = [one for one in results if one.outcome is not Outcome.IDENTICAL and TIED not in one.steps]
    ordered = sorted(bad, key=lambda one: one.badness)
    loose = facts.compared.one.checkpoint.loose.keys() ^ facts.compared.two.checkpoint.loose.keys()
    skipped = _state_gap(facts) if not results else ""
    if loose and not skipped:
        skipped = f"of {count(len(loose), 'tensor')} that one side keeps it is not known of which parameter"
    if not bad:
        return Answer(exercised=len(results), skipped=skipped, applies=bool(skipped))
    lines = [f"{one.pair.role} of {one.name}: {difference_words(one, facts.compared)}" for one in ordered]
    differs = [one for one in bad if one.outcome is not Outcome.SAME_AFTER]
    finding = Finding(
        id="optimizer.state",
        severity=Severity.ERROR if differs else Severity.WARNING,
        confidence=0.95,
        title=f"{len(bad)} of {count(len(results), 'tensor')} that the optimizer keeps "
        f"{agree(len(bad), 'differ')}",
        evidence=shortened(lines, 12),
        remedy=_REMEDIES["optimizer.state"],
    )
    return Answer(exercised=len(results), findings=(finding,), failed=len(bad), skipped=skipped)


def _state_gap(facts: Facts) -> str:
    sides = (("baseline", facts.compared.one), ("candidate", facts.compared.two))
    have = [name for name, side in sides if side.checkpoint.states or side.checkpoint.loose]
    if not have:
        return ""
    if len(have) == 1:
        return f"only the {have[0]} has the optimizer's tensors"
    return "the optimizer's tensors are not known to be of a parameter"


@CKPT.register(
    "parallel.replicas_differ",
    holds="copies that several ranks hold of one tensor are equal",
    unit="tensors",
)
def copies(facts: Facts) -> Answer:
    """Say of which tensors the ranks' files hold different copies."""
    findings = []
    sides = (("baseline", facts.compared.one.checkpoint), ("candidate", facts.compared.two.checkpoint))
    for name, checkpoint in sides:
        if checkpoint.copies:
            lines = [
                f"{one.name}: {' / '.join(', '.join(group) for group in one.holders)}"
                for one in checkpoint.copies
            ]
            findings.append(
                Finding(
                    id="parallel.replicas_differ",
                    severity=Severity.ERROR,
                    confidence=0.95,
                    title=f"ranks of the {name} hold different copies of {count(len(lines), 'tensor')}",
                    evidence=shortened(lines, 12),
                    remedy="look for the reduction that keeps them equal, or for files of another training",
                )
            )
    checked = len(facts.compared.results) if facts.compared.sharded else 0
    failed = sum(len(one.copies) for _, one in sides)
    return Answer(exercised=checked, findings=tuple(findings), failed=failed, applies=facts.compared.sharded)


@CKPT.register(
    "coverage.not_compared", holds="everything in the checkpoints was read and told apart", unit="tensors"
)
def read(facts: Facts) -> Answer:
    """Say what was not read, or not put together, and why."""
    lines = [f"{one.name}: {one.detail}" for one in facts.compared.results if one.outcome is Outcome.NOT_READ]
    sides = (("baseline", facts.compared.one.checkpoint), ("candidate", facts.compared.two.checkpoint))
    for name, checkpoint in sides:
        lines += [f"{name}: {line}" for line in checkpoint.unread]
    looked = sum(one.outcome is not Outcome.NOT_READ for one in facts.compared.results)
    if not lines:
        return Answer(exercised=looked)
    parameters_too = any(one.outcome is Outcome.NOT_READ for one in facts.parameters())
    finding = Finding(
        id="coverage.not_compared",
        severity=Severity.ERROR if parameters_too else Severity.WARNING,
        confidence=0.9,
        title=f"{count(len(lines), 'thing')} in the checkpoints {agree(len(lines), 'were')} not compared",
        evidence=shortened(lines),
        remedy="what is listed is not known to agree: save it in another format, or name it with --mapping",
    )
    return Answer(exercised=looked, findings=(finding,), failed=len(lines))
