"""Weights before the first step: missing, of another shape or dtype, or changed in a known way."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_precision.align.vocabulary import Padding
from mindspeed_precision.counting import agree, count
from mindspeed_precision.records import INIT_STEP, Finding, Phase, RecordKey, Role, Severity, Side
from mindspeed_precision.verify.pair.evidence import listed, shortened
from mindspeed_precision.verify.pair.registry import pair_check
from mindspeed_precision.verify.pair.weight_pairs import Way, WeightDifference, difference, pairs
from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Answer

_IDS = {
    Way.SHAPE: "weights.other_shape",
    Way.TRANSPOSED: "weights.transposed",
    Way.PERMUTED: "weights.permuted",
    Way.CAST: "weights.cast",
    Way.SCALED: "weights.scaled",
    Way.SPREAD: "weights.other_spread",
    Way.OTHER: "weights.initial_differs",
}
_TITLES = {
    Way.SHAPE: "have another shape",
    Way.TRANSPOSED: "are transposed",
    Way.PERMUTED: "hold the same elements in another order",
    Way.CAST: "are the same but for a cast",
    Way.SCALED: "are a multiple of the other run's",
    Way.SPREAD: "have other numbers, of another spread",
    Way.OTHER: "have other numbers",
}
_REMEDIES = {
    Way.SHAPE: "build the same model, or convert the checkpoint for this one",
    Way.TRANSPOSED: "transpose them in the conversion of the checkpoint: Megatron keeps [out, in]",
    Way.PERMUTED: "look at the order that the conversion gives rows: query, key and value by head or in "
    "blocks, gate and up projection, rotary halves",
    Way.CAST: "convert and save checkpoints in the dtype of the master weights",
    Way.SCALED: "look for a factor of the conversion or of the initialisation",
    Way.SPREAD: "compare the initialisation: --init-method-std, a tensor that is never initialised, dtype",
    Way.OTHER: "load the same checkpoint in both runs, or use the same seed and order of initialisation",
}
_OTHER_LAYOUT = "; in another layout Megatron draws other numbers of one seed: begin with init_from=RUN"


@pair_check(
    "weights.initial_differs",
    "weights.missing",
    "weights.other_dtype",
    "config.vocabulary_padding",
    *(id_ for way, id_ in _IDS.items() if way is not Way.OTHER),
    holds="every parameter is in both runs before the first step, with the same bits",
    unit="parameters",
)
def weights(facts: PairFacts) -> Answer:
    """Compare the parameters before the first step, and tell in which way they differ."""
    findings = [*_missing(facts), *_dtypes(facts)]
    compared = list(pairs(facts))
    skipped = _skipped(facts, len(compared))
    if facts.uncertain:
        return Answer(exercised=0, findings=tuple(findings), skipped=skipped)
    found = [difference(fqn, one, two) for fqn, one, two in compared]
    apart = [one for one in found if one.way is not Way.SAME]
    padded = facts.padding
    if padded is not None:
        apart = [one for one in apart if one.fqn not in padded.names or one.way is not Way.SHAPE]
    for way in Way:
        alike = [one for one in apart if one.way is way]
        if alike:
            findings.append(_finding(facts, way, alike, len(found)))
    if padded is not None:
        findings.append(_padding(padded))
    return Answer(
        exercised=len(found),
        findings=tuple(findings),
        failed=len({one.fqn for one in apart}),
        skipped=skipped,
    )


def _skipped(facts: PairFacts, compared: int) -> str:
    if facts.uncertain:
        return facts.uncertain
    if not compared:
        return "the weights before the first step were not recorded in both runs"
    return ""


def _missing(facts: PairFacts) -> list[Finding]:
    one, two = facts.rows[Side.BASELINE], facts.rows[Side.CANDIDATE]
    findings: list[Finding] = []
    if not one or not two:
        return findings
    bits = {
        side: {w.record.digest.fingerprint: fqn for (_, fqn), w in facts.weights[side].items()}
        for side in Side
    }
    for side, mine, other in ((Side.BASELINE, one, two), (Side.CANDIDATE, two, one)):
        alone = [fqn for fqn in facts.row_names(side) if fqn not in other]
        if not alone:
            continue
        lines = []
        for fqn in alone:
            record = next((w.record for (_, name), w in facts.weights[side].items() if name == fqn), None)
            twin = bits[side.other].get(record.digest.fingerprint) if record is not None else None
            same = f": the bits of {twin} of the other run" if twin and twin not in mine else ""
            lines.append(f"{fqn} {list(mine[fqn].shape)}{same}")
        findings.append(
            Finding(
                id="weights.missing",
                severity=Severity.ERROR,
                confidence=0.95,
                title=f"{count(len(alone), 'parameter')} of the {side.value} {agree(len(alone), 'are')} "
                f"not in the {side.other.value}",
                evidence=shortened(lines),
                remedy="build the same model; where it merely names them otherwise, say so with --mapping",
                where=_key(alone[0]),
            )
        )
    return findings


def _finding(facts: PairFacts, way: Way, found: Sequence[WeightDifference], total: int) -> Finding:
    names = list(dict.fromkeys(one.fqn for one in found))
    sure = all(one.sure for one in found)
    lines = [f"{one.fqn}: {one.detail}" if one.detail else one.fqn for one in found]
    # of two dtypes it is what is to be expected: the dtypes are a finding of their own
    expected = way is Way.CAST and all(
        one.baseline.record.dtype != one.candidate.record.dtype for one in found
    )
    return Finding(
        id=_IDS[way],
        severity=Severity.WARNING if expected else Severity.ERROR,
        confidence=0.95 if sure else 0.6,
        title=f"{len(names)} of {total} parameters {_TITLES[way]}: {listed(names, 3)}",
        evidence=(
            *shortened(lines),
            *(() if sure else ("estimated: with elements (capture.level=tensor) it is decided",)),
        ),
        remedy=_REMEDIES[way] + (_OTHER_LAYOUT if facts.other_layout and way is Way.OTHER else ""),
        where=_key(names[0]),
    )


def _dtypes(facts: PairFacts) -> list[Finding]:
    one, two = facts.rows[Side.BASELINE], facts.rows[Side.CANDIDATE]
    apart = [
        f"{fqn}: {row.dtype} in the baseline, {two[fqn].dtype} in the candidate"
        for fqn, row in one.items()
        if fqn in two and row.dtype != two[fqn].dtype
    ]
    if not apart:
        return []
    return [
        Finding(
            id="weights.other_dtype",
            severity=Severity.ERROR,
            confidence=0.97,
            title=f"{count(len(apart), 'parameter', 'have')} another dtype",
            evidence=shortened(apart),
            remedy="use the same --params-dtype, --bf16, --fp16 and mixed-precision policy in both runs",
            where=_key(apart[0].partition(":")[0]),
        )
    ]


def _padding(padding: Padding) -> Finding:
    names = sorted(padding.names)
    return Finding(
        id="config.vocabulary_padding",
        severity=Severity.ERROR,
        confidence=0.9,
        title=f"{padding.text}: Megatron's softmax sums over all of them",
        evidence=tuple(names),
        remedy="pad both alike (--make-vocab-size-divisible-by times the tensor-parallel size)",
        where=_key(names[0]),
    )


def _key(fqn: str) -> RecordKey:
    return RecordKey(step=INIT_STEP, phase=Phase.INIT, fqn=fqn, role=Role.PARAM)
