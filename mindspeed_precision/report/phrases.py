"""Facts of a diagnosis as phrases; the console, and later reports, are made of them."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_precision.counting import count
from mindspeed_precision.records import (
    INIT_STEP,
    NO_MICROBATCH,
    Diagnosis,
    Finding,
    Judgement,
    Origin,
    Pair,
    Phase,
    RecordKey,
    Replay,
    Role,
    Side,
    Verdict,
)
from mindspeed_precision.report.loss_table import first_difference, recorded, tolerated

_PHASES = {
    Phase.INIT: "in the initial parameters",
    Phase.BATCH: "in the data",
    Phase.FPROP: "in the forward pass",
    Phase.LOSS: "in the loss",
    Phase.DGRAD: "in the backward pass",
    Phase.WGRAD: "in the backward pass",
    Phase.ACCUMULATE: "in gradient accumulation",
    Phase.REDUCE: "in gradient reduction",
    Phase.CLIP: "in gradient clipping",
    Phase.OPTIMIZER: "in the optimizer",
}
_ROLES = {Role.WGRAD: "wgrad (dW)", Role.BGRAD: "bgrad (gradient of the bias)", Role.PARAM: "parameter"}
_WRONG, _TIMES = 1e-2, 100
"""An operation this far from float64, and this many times further than the other side's, is no rounding."""
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_TELLING_ULP = 1 << 20
"""From here on a distance in units in the last place says only that the numbers are others."""

_MOST_ORIGINS = 8
"""Places of origins that are listed."""

_WIDEST_RECIPE = 45
"""Up to here recipes stand in a column beside what they give; longer ones stand above it."""


def verdict_sentence(diagnosis: Diagnosis) -> str:
    """Return the first line: the verdict, and where."""
    first = diagnosis.first_divergence
    compared = f"{count(diagnosis.compared, 'record')} of {_steps(diagnosis.steps)}"
    if diagnosis.status is Verdict.IDENTICAL:
        return f"IDENTICAL: {compared} have the same bits."
    if diagnosis.status is Verdict.WITHIN_TOLERANCE:
        return f"WITHIN TOLERANCE: {compared} agree, though not all bit for bit."
    if diagnosis.status is Verdict.MISSING:
        return "NOT CERTIFIED: nothing that was compared differs, but it does not prove that the runs agree."
    if first is None:
        return "DIVERGED: every record is within tolerance, but the loss over the steps is not."
    return f"DIVERGED {moment(first.key)}."


def moment(key: RecordKey) -> str:
    """Say when a record was seen."""
    if key.step == INIT_STEP:
        return f"before the first step, {_PHASES[key.phase]}"
    if key.role is Role.RNG:
        return f"at step {key.step}, in the random state alone"
    microbatch = f", microbatch {key.microbatch}" if key.microbatch != NO_MICROBATCH else ""
    return f"at step {key.step}{microbatch}, {_PHASES[key.phase]}"


def scalars_sentence(diagnosis: Diagnosis) -> str:
    """Say whether loss and grad norm agree at the first divergence, and from when they differ."""
    first = diagnosis.first_divergence
    names = {"grad_norm": "grad norm", "loss": "loss"}
    known = {text: name for name, text in names.items() if recorded(diagnosis.scalars, name)}
    if first is None or not known:
        return ""
    since = {text: first_difference(diagnosis.scalars, name) for text, name in known.items()}
    agree = sorted((t for t, step in since.items() if step is None or step > first.key.step), reverse=True)
    still = ""
    if agree and first.key.step != INIT_STEP:
        still = f"{' and '.join(agree)} still agree{'s' if len(agree) == 1 else ''} there"
    changes: dict[int, list[str]] = {}
    for text, step in since.items():
        if step is not None:
            changes.setdefault(step, []).append(f"the {text}")
    later: list[str] = []
    for step in sorted(changes):
        verb = "" if later else (" differ" if len(changes[step]) > 1 else " differs")
        later.append(f"{' and '.join(changes[step])}{verb} from step {step}")
    never = [text for text, step in since.items() if step is None]
    if never:
        word = "neither differs" if len(never) == len(names) else f"the {never[0]} never differs"
        beyond = any(tolerated(diagnosis.scalars, known[text]) for text in never)
        later.append(f"{word}{' beyond the tolerance' if beyond else ''} in the compared steps")
    sentence = "; ".join(filter(None, (still, ", ".join(later))))
    return f"{sentence[:1].upper()}{sentence[1:]}."


def record_name(key: RecordKey) -> str:
    """Name a record by what it is."""
    if key.fqn == key.role.value:
        return f"{key.fqn} [{key.slot}]" if key.slot else key.fqn
    slot = f" [{key.slot}]" if key.slot else ""
    call = f" (call {key.occurrence})" if key.occurrence else ""
    redo = " (recomputed)" if key.recomputed else ""
    return f"{key.fqn or '(model)'}   {_ROLES.get(key.role, key.role.value)}{slot}{call}{redo}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Name ranks."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def difference(origin: Origin) -> str:
    """Say in one line by how much the two sides differ."""
    comparison = origin.comparison
    metrics = comparison.metrics
    if not isinstance(comparison.pair, Pair) or comparison.verdict is Verdict.INCOMPARABLE:
        return comparison.reason
    if metrics.get("elements") == 1:
        one, two = comparison.pair.baseline.value, comparison.pair.candidate.value
        return f"{one:.10g} in the baseline, {two:.10g} in the candidate"
    if "mismatched" in metrics:
        return _element_difference(metrics, comparison.pair.candidate.dtype)
    differ = "bits differ" if comparison.pair.bits_known else "numbers differ"
    order = "the same elements in another order" if metrics.get("permutation") else differ
    if "sketch_low" in metrics:
        return f"{order}; {_estimated(metrics)}; elements were not kept"
    change = metrics.get("norm_change")
    if change is None or "float" not in comparison.pair.candidate.dtype:
        return order
    norm = (
        "the norm is the same in every digit" if change == 0 else f"the norm moves by {change:.1e} (relative)"
    )
    return f"{order}; {norm}; elements were not kept"


def _estimated(metrics: Mapping[str, float | int | bool]) -> str:
    if "sketch_distance" not in metrics:
        return f"the relative error is below {metrics['sketch_high']:.2g} (estimated)"
    distance, low, high = (metrics[f"sketch_{end}"] for end in ("distance", "low", "high"))
    between = f", {low:.2g} to {high:.2g}" if low < distance < high else ""
    return f"relative error about {distance:.2g} (estimated{between})"


def _element_difference(metrics: object, dtype: str) -> str:
    assert isinstance(metrics, dict)
    text = f"{_grouped(metrics['mismatched'])} of {_grouped(metrics['elements'])} elements differ"
    if metrics.get("max_ulp", _TELLING_ULP) < _TELLING_ULP:
        text += f", by at most {_grouped(metrics['max_ulp'])} {_SHORT_DTYPES.get(dtype, dtype)} ulp"
    text += f"; relative {metrics['rel_frobenius']:.1e}" if "rel_frobenius" in metrics else ""
    worst, whole = metrics.get("worst_rows_rel_err", 0.0), metrics.get("rel_frobenius", 0.0)
    if worst > 10 * whole > 0:
        first, count = metrics["worst_rows_first"], metrics["worst_rows_count"]
        rows = f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"
        text += f", but {worst:.1e} in {rows}"
    return text


def replay_lines(replay: Replay) -> list[str]:
    """Say which recipe gives which side bit for bit."""
    recorded_ones = [recipe for recipe in replay.recipes if recipe.recorded_for]
    hits_any = [r for r in replay.recipes if 0 in (r.baseline_mismatched, r.candidate_mismatched)]
    what = "dW" if replay.key.role is Role.WGRAD else replay.key.role.value
    told = (
        [r for r in recorded_ones if r in hits_any]
        if replay.proved
        else list(dict.fromkeys([*recorded_ones, *hits_any]))
    )
    width = max((len(recipe.recipe) for recipe in told), default=0)
    lines = []
    for recipe in told:
        hits = [
            side.value
            for side, count in (
                (Side.BASELINE, recipe.baseline_mismatched),
                (Side.CANDIDATE, recipe.candidate_mismatched),
            )
            if count == 0
        ]
        if hits:
            outcome = f"gives the {' and the '.join(hits)}'s {what} bit for bit"
        else:
            counts = f"{_grouped(recipe.baseline_mismatched)} and {_grouped(recipe.candidate_mismatched)}"
            outcome = f"gives neither side: {counts} elements differ"
        if width > _WIDEST_RECIPE:
            lines += [recipe.recipe, f"  {outcome}"]
        else:
            lines.append(f"{recipe.recipe.ljust(width)}   {outcome}")
    return lines


def judgement(replay: Replay) -> str:
    """Say which side is further from float64, or that neither is wrong."""
    one, two = replay.baseline_error, replay.candidate_error
    if max(one, two) <= 1.5 * min(one, two):
        share = f"{one:.1e}" if f"{one:.1e}" == f"{two:.1e}" else f"{one:.2e} and {two:.2e}"
        return f"both are equally far from float64 ({share}): neither is wrong, but they must be the same"
    worse, name = (one, "baseline") if one > two else (two, "candidate")
    if worse > _WRONG and min(one, two) < worse / _TIMES:
        other = f"{min(one, two):.1e}"
        return f"the {name} is wrong: {worse:.1e} away from float64, the other {other}: suspect the {name}"
    return f"the {name} is further from float64 ({worse:.1e} against {min(one, two):.1e}): suspect the {name}"


def others(diagnosis: Diagnosis, cause: Finding | None) -> str:
    """Say what else is an origin, and how much only follows."""
    if diagnosis.first_divergence is None:
        return ""
    same = [o for o in diagnosis.origins[1:] if cause is not None and o.key in cause.explains]
    rest = len(diagnosis.origins) - 1 - len(same)
    parts = []
    if same:
        steps = sorted({origin.key.step for origin in same})
        where = "before the first step" if steps == [INIT_STEP] else f"at {_steps(tuple(steps))}"
        parts.append(f"{len(same)} more {_kind(same)} {where}, same cause")
    parts.append(f"{count(rest, 'other origin')}" if rest else "no other origin")
    follow = diagnosis.diverged - sum(len(origin.ranks) for origin in diagnosis.origins)
    if follow == 1:
        parts.append(
            f"1 more record differs only because of {'these' if len(diagnosis.origins) > 1 else 'it'}"
        )
    elif follow > 1:
        parts.append(
            f"{_grouped(follow)} more records differ only because of "
            f"{'these' if len(diagnosis.origins) > 1 else 'it'}"
        )
    return "; ".join(parts)


def origin_lines(diagnosis: Diagnosis, cause: Finding | None) -> list[str]:
    """Say of each origin what follows from it, where there are several causes; else nothing."""
    groups: dict[tuple[object, ...], list[Origin]] = {}
    known = cause.explains if cause is not None else ()
    for number, origin in enumerate(diagnosis.origins):
        key = origin.key
        same = number == 0 or key in known
        groups.setdefault(() if same else (key.phase, key.fqn, key.role, key.slot), []).append(origin)
    if len(groups) < 2:
        return []
    lines = []
    for place, origins in groups.items():
        steps = tuple(sorted({origin.key.step for origin in origins} - {INIT_STEP}))
        where = f" at {_steps(steps)}" if steps else " before the first step"
        name = record_name(origins[0].key) + where if place else "the first and its like"
        follow = sum(origin.propagated for origin in origins)
        lines.append(f"  {name}: explain{'s' if place else ''} {count(follow, 'more record')}")
    rest = len(lines) - _MOST_ORIGINS
    return [*lines[:_MOST_ORIGINS], *([f"  and {count(rest, 'more origin')}"] if rest > 0 else [])]


def _kind(origins: list[Origin]) -> str:
    roles = {origin.key.role for origin in origins}
    if roles == {Role.WGRAD}:
        return "dW"
    plural = "" if len(origins) == 1 else "s"
    return f"{roles.pop().value} record{plural}" if len(roles) == 1 else f"record{plural}"


def coverage_text(diagnosis: Diagnosis) -> str:
    """Say what was looked at."""
    coverage = diagnosis.coverage
    text = (
        f"{coverage.parameters_with_wgrad} of {coverage.parameters} parameters have dW; "
        f"{_grouped(coverage.matched)} of {_grouped(coverage.records)} records matched"
    )
    return text + (f", {coverage.unmatched} without a partner" if coverage.unmatched else "")


def policy_text(diagnosis: Diagnosis) -> str:
    """Say which policy decided, and what."""
    counts = [
        f"{_grouped(diagnosis.decided[v])} {v.value.replace('_', ' ')}"
        for v in Verdict
        if diagnosis.decided.get(v)
    ]
    return f"{diagnosis.policy} ({', '.join(counts)})"


def acceptance_text(diagnosis: Diagnosis) -> str:
    """Say in one line what Ascend's acceptance criterion says of the same records; empty where not asked."""
    found = diagnosis.acceptance
    if found is None:
        return ""
    passed, failed, undecided = (found.records[judgement] for judgement in Judgement)
    parts = [f"{count(passed, 'record')} pass"]
    if found.first_failed is not None:
        name = " ".join(record_name(found.first_failed).split())
        parts.append(
            f"{_grouped(failed)} fail (first {name} at step {found.first_failed.step}: {found.reason})"
        )
    if undecided:
        parts.append(f"{_grouped(undecided)} undecided for want of elements")
    loss = "loss undecided"
    if found.loss_error is not None and found.loss_limit is not None:
        loss = f"loss error {found.loss_error:.2g}, allowed {found.loss_limit:g}"
    return f"{found.status.value}: {', '.join(parts)}; {loss}"


def _steps(steps: tuple[int, ...]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps and steps == tuple(range(steps[0], steps[-1] + 1)):
        return f"steps {steps[0]} to {steps[-1]}"
    return f"{len(steps)} steps"


def byte_count(number: int) -> str:
    """Write a number of bytes to two digits: ``2.6 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            amount = number / size
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    return f"{number} B"


def _grouped(number: float) -> str:
    """Write an integer with a space between thousands."""
    return f"{int(number):,}".replace(",", " ")
