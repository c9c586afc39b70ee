"""The tables of ``ckpt``: by layer, the worst first; then every parameter that is not identical."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mindspeed_precision.ckpt.conventions import row_words
from mindspeed_precision.ckpt.results import WORDS, Compared, Outcome, Result
from mindspeed_precision.counting import count
from mindspeed_precision.records import Finding, Severity

_MOST = 40
_SHOWN = 6


def number(value: float) -> str:
    """Return a number as it is shown: three digits; ``inf`` also where a side is not finite."""
    return "inf" if math.isinf(value) else f"{value:.3g}"


def ranges(rows: Sequence[int], most: int = _SHOWN) -> str:
    """Return numbers as ranges, of many the first ones: ``3, 8-15``."""
    found: list[list[int]] = []
    for row in rows:
        if found and found[-1][1] == row - 1:
            found[-1][1] = row
        else:
            found.append([row, row])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in found[:most]]
    return ", ".join(shown) + (f" and {count(len(found) - most, 'more range')}" if len(found) > most else "")


def difference_words(result: Result, compared: Compared) -> str:
    """Say how far a parameter is apart, and where."""
    metrics = result.metrics
    if not metrics:
        return result.detail
    unbounded = "finite_" if "nonfinite" in metrics else ""
    told = [
        f"max abs {number(metrics[f'{unbounded}max_abs'])}",
        f"relative {number(metrics[f'{unbounded}rel_frobenius'])}",
    ]
    if "cosine" in metrics:
        told.append(f"cosine {_cosine(float(metrics['cosine']))}")
    if unbounded:
        broken = count(int(metrics["nonfinite"]), "element", "differ")
        told[0] = f"{broken} by NaN or infinity; of the others {told[0]}"
    return ", ".join(told) + f"; {_where(result, compared)}" + (f"; {result.detail}" if result.detail else "")


def _cosine(value: float) -> str:
    return f"1 - {1 - value:.1e}" if 0.999 < value < 1 else f"{value:.4f}"


def _where(result: Result, compared: Compared) -> str:
    metrics, told = result.metrics, result.told
    assert told is not None
    rows, total = told.rows, int(metrics["rows"])
    elements = f"{metrics['mismatched']} of {count(int(metrics['elements']), 'element')}"
    if len(rows) == total:
        return f"{elements}, in every row" if total > 1 else elements
    worst = int(metrics["worst_row"])
    name = row_words(result.name, worst, total, compared.geometry)
    tail = (
        f", worst row {worst}" + (f" ({name})" if name else "") + f" by {number(metrics['worst_row_error'])}"
    )
    tail = tail if len(rows) > 1 or name else ""
    return f"{elements}, in {len(rows)} of {count(total, 'row')}: {ranges(rows)}{tail}"


def layer_lines(compared: Compared) -> tuple[str, ...]:
    """Return one line for each layer, the worst first; those that are identical share the last one."""
    layers: dict[str, list[Result]] = defaultdict(list)
    for result in compared.of_role(parameters=True):
        layers[result.layer].append(result)
    rows: list[tuple[str, ...]] = [("layer", "parameters", "identical", "same after", "else", "worst")]
    alike: list[str] = []
    for layer, results in sorted(layers.items(), key=lambda item: min(one.badness for one in item[1])):
        counts = Counter(one.outcome for one in results)
        if counts[Outcome.IDENTICAL] == len(results):
            alike.append(layer)
            continue
        worst = min(results, key=lambda one: one.badness)
        rest = len(results) - counts[Outcome.IDENTICAL] - counts[Outcome.SAME_AFTER]
        numbers = (len(results), counts[Outcome.IDENTICAL], counts[Outcome.SAME_AFTER], rest)
        rows.append((layer, *map(str, numbers), _worst(worst)))
    if len(rows) == 1:
        return ()
    return (*table(rows), *((f"identical in all: {_layers(alike)}",) if alike else ()))


def _layers(names: Sequence[str]) -> str:
    """Return names of layers, numbered ones as ranges."""
    numbered: dict[str, list[int]] = defaultdict(list)
    for name in names:
        stem, _, last = name.rpartition(".")
        numbered[stem if last.isdigit() else name] += [int(last)] if last.isdigit() else []
    return ", ".join(
        f"{stem}.{ranges(sorted(numbers))}" if numbers else stem for stem, numbers in numbered.items()
    )


def _worst(result: Result) -> str:
    if result.outcome is Outcome.IDENTICAL:
        return ""
    own = result.name.removeprefix(f"{result.layer}.")
    if result.metrics:
        return f"{own}: {result.outcome.value}, {_how_far(result)}"
    return f"{own}: {result.outcome.value}"


def _how_far(result: Result) -> str:
    if "nonfinite" in result.metrics:
        return "NaN or infinite on one side"
    return f"relative {number(result.metrics['rel_frobenius'])}"


def parameter_lines(compared: Compared, *, every: bool) -> tuple[str, ...]:
    """Return the parameters that are not identical, the worst first; all of them where that was asked for."""
    found = [
        one for one in compared.of_role(parameters=True) if every or one.outcome is not Outcome.IDENTICAL
    ]
    return _listed(found, compared, every=every)


def state_lines(compared: Compared, *, every: bool) -> tuple[str, ...]:
    """Return what the optimizer keeps and is not identical."""
    found = [
        one for one in compared.of_role(parameters=False) if every or one.outcome is not Outcome.IDENTICAL
    ]
    return _listed(found, compared, every=every)


def _listed(found: Iterable[Result], compared: Compared, *, every: bool) -> tuple[str, ...]:
    ordered = sorted(found, key=lambda one: one.badness)
    if not ordered:
        return ()
    shown = ordered if every else ordered[:_MOST]
    rows = [("tensor", "answer", "max abs", "relative", "cosine", "where, or after what")]
    for one in shown:
        label = one.name if one.pair.role == "param" else f"{one.pair.role} of {one.name}"
        rows.append((label, one.outcome.value, *_numbers(one), _briefly(one)))
    more = len(ordered) - len(shown)
    return (*table(rows), *((f"and {more} more (--all shows them)",) if more else ()))


def summary(compared: Compared, findings: Sequence[Finding]) -> str:
    """Return the answer in one sentence."""
    results = compared.of_role(parameters=True)
    if not results:
        return "NO ANSWER: no parameters were found."
    if all(one.outcome is Outcome.NOT_READ for one in results):
        return f"NO ANSWER: none of {count(len(results), 'parameter')} could be compared."
    errors = {finding.id for finding in findings if finding.severity is Severity.ERROR}
    beside = sorted(id_ for id_ in errors if not id_.startswith("weights."))
    answer = _of_parameters(results, bad=any(id_.startswith("weights.") for id_ in errors))
    return f"{answer} Errors beside them: {', '.join(beside)}." if beside else answer


def _of_parameters(results: Sequence[Result], *, bad: bool) -> str:
    counts = {outcome: sum(one.outcome is outcome for one in results) for outcome in Outcome}
    total, identical, after = len(results), counts[Outcome.IDENTICAL], counts[Outcome.SAME_AFTER]
    if identical == total:
        every = "" if total == 1 else "all "
        return f"IDENTICAL: {every}{count(total, 'parameter', 'have')} the same bits."
    if identical + after == total:
        kinds = sorted({WORDS.get(way, str(way)) for one in results for way in one.steps})
        word = "DIFFERENT, but by no numbers" if bad else "SAME"
        same = f"{after} the same after: {', '.join(kinds)}"
        return f"{word}: of {count(total, 'parameter')} {identical} identical, {same}."
    told = ", ".join(f"{found} {outcome.value}" for outcome, found in counts.items() if found)
    differing = [one for one in results if one.metrics]
    worst = max(differing, key=lambda one: one.metrics["rel_frobenius"], default=None)
    tail = f" Worst: {worst.name}, {_how_far(worst)}." if worst else ""
    return f"DIFFERENT: of {count(total, 'parameter')} {told}.{tail}"


def _numbers(result: Result) -> tuple[str, str, str]:
    metrics = result.metrics
    if not metrics:
        return "", "", ""
    cosine = _cosine(float(metrics["cosine"])) if "cosine" in metrics else ""
    return number(metrics["max_abs"]), number(metrics["rel_frobenius"]), cosine


def _briefly(result: Result) -> str:
    """Say in a few words where a tensor differs, or what makes it the same."""
    if result.steps:
        return ", ".join(WORDS.get(way, str(way)) for way in result.steps)
    metrics = result.metrics
    if not metrics or result.told is None:
        return result.detail if result.outcome is not Outcome.IDENTICAL else ""
    rows = result.told.rows
    return "every row" if len(rows) == metrics["rows"] else f"rows {ranges(rows, 3)} of {metrics['rows']}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of one width per column; the last column is left as it is."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


__all__ = [
    "difference_words",
    "layer_lines",
    "number",
    "parameter_lines",
    "ranges",
    "state_lines",
    "summary",
    "table",
]
