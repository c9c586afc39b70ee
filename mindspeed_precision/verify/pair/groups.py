"""Parameter groups of two runs: who is trained, by which numbers, in which dtype, tied to what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindspeed_precision.counting import count
from mindspeed_precision.records import Finding, Phase, RecordKey, Role, Severity, Side
from mindspeed_precision.verify.group_table import MULTIPLIERS, OF_LAYOUT, ParameterRow
from mindspeed_precision.verify.pair.evidence import listed, shortened
from mindspeed_precision.verify.pair.registry import pair_check
from mindspeed_precision.verify.pair_facts import PairFacts
from mindspeed_precision.verify.registry import Answer

_HYPERPARAMETERS = {
    "weight_decay": "optimizer.weight_decay",
    "lr": "optimizer.lr",
    "eps": "optimizer.eps",
    "beta1": "optimizer.beta",
    "beta2": "optimizer.beta",
    "step": "optimizer.step_counter",
    "momentum": "optimizer.hyperparameter",
}
_REMEDIES = {
    "optimizer.weight_decay": "compare the parameter groups and --weight-decay",
    "optimizer.lr": "compare --lr, the schedule, --decoupled-lr and lr_mult",
    "optimizer.eps": "compare --adam-eps, and whether the optimizer is given it",
    "optimizer.beta": "compare --adam-beta1 and --adam-beta2, and whether the optimizer is given them",
    "optimizer.step_counter": "load the optimizer's state in both runs or in none; who counts twice?",
    "optimizer.hyperparameter": "compare the optimizer's arguments",
}


def _both(facts: PairFacts) -> list[tuple[ParameterRow, ParameterRow]]:
    one, two = facts.rows[Side.BASELINE], facts.rows[Side.CANDIDATE]
    return [(row, two[fqn]) for fqn, row in one.items() if fqn in two]


@pair_check(
    "optimizer.groups_differ",
    holds="every parameter is in a group with the same multipliers, and once",
    unit="parameters",
)
def membership(facts: PairFacts) -> Answer:
    """Compare which group each parameter is in, by the group's multipliers."""
    both = [(one, two) for one, two in _both(facts) if one.grouped is not None and two.grouped is not None]
    lines: list[tuple[str, str]] = []
    # whether experts are spread over ranks is what the layouts say already
    names = [name for name in MULTIPLIERS if name != OF_LAYOUT or not facts.other_layout]
    for one, two in both:
        said = _membership(one, two, names)
        if said:
            lines.append((one.fqn, said))
    findings: tuple[Finding, ...] = ()
    if lines:
        findings = (
            _finding(
                "optimizer.groups_differ",
                f"{count(len(lines), 'parameter', 'are')} in another group",
                lines,
                "make the conditions of the groups the same (no_weight_decay_cond, scale_lr_cond): biases "
                "and norms are usually not decayed",
            ),
        )
    skipped = "" if both else "no run says which groups its optimizer has"
    return Answer(exercised=len(both), findings=findings, failed=len(lines), skipped=skipped)


def _membership(one: ParameterRow, two: ParameterRow, names: Sequence[str]) -> str:
    if one.grouped != two.grouped:
        return f"{_in(one)} in the baseline, {_in(two)} in the candidate"
    if one.times != two.times and one.times and two.times:
        return f"in {one.times} groups in the baseline, in {two.times} in the candidate"
    apart = [
        f"{name} {one.multipliers[name]} in the baseline, {two.multipliers[name]} in the candidate"
        for name in names
        if name in one.multipliers
        and name in two.multipliers
        and one.multipliers[name] != two.multipliers[name]
    ]
    return "; ".join(apart)


def _in(row: ParameterRow) -> str:
    return "in a group" if row.grouped else "in no group"


@pair_check(
    *dict.fromkeys(_HYPERPARAMETERS.values()),
    holds="the optimizer applies the same numbers to every parameter, at every recorded step",
    unit="numbers",
)
def hyperparameters(facts: PairFacts) -> Answer:
    """Compare the numbers that the optimizers applied; where none was recorded, those of the groups."""
    series = {side: _series(facts, side) for side in Side}
    one, two = series[Side.BASELINE], series[Side.CANDIDATE]
    common = [place for place in one if place in two]
    if not common:
        return _from_groups(facts)
    apart: dict[tuple[str, float, float], dict[str, int]] = defaultdict(dict)
    for fqn, slot, step in common:
        left, right = one[fqn, slot, step], two[fqn, slot, step]
        if left != right and slot in _HYPERPARAMETERS and not _known(apart, fqn, slot):
            apart[slot, left, right][fqn] = step
    findings = tuple(_number(slot, a, b, found) for (slot, a, b), found in apart.items())
    failed = len({(fqn, slot) for (slot, _, _), found in apart.items() for fqn in found})
    return Answer(exercised=len(common), findings=findings, failed=failed)


def _known(apart: dict[tuple[str, float, float], dict[str, int]], fqn: str, slot: str) -> bool:
    """Tell whether an earlier step of the same parameter and number was found to differ."""
    return any(fqn in found for (name, _, _), found in apart.items() if name == slot)


def _series(facts: PairFacts, side: Side) -> dict[tuple[str, str, int], float]:
    """Return the applied numbers by parameter, name and step, in order of steps."""
    wanted = set(facts.steps)
    found: dict[tuple[str, str, int], float] = {}
    for rank in facts.run(side).ranks.values():
        for record in rank.records:
            key = record.key
            if key.role is Role.HYPERPARAMETER and key.step in wanted and record.value is not None:
                found.setdefault((key.fqn, key.slot, key.step), record.value)
    return dict(sorted(found.items(), key=lambda item: item[0][2]))


def _number(slot: str, one: float, two: float, found: dict[str, int]) -> Finding:
    id_ = _HYPERPARAMETERS[slot]
    names = list(found)
    step = min(found.values())
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"the optimizer applies {slot} {one:.8g} in the baseline and {two:.8g} in the candidate "
        f"to {count(len(names), 'parameter')}",
        evidence=(f"first: step {step}", *shortened(names)),
        remedy=_REMEDIES[id_],
        where=RecordKey(step=step, phase=Phase.OPTIMIZER, fqn=names[0], role=Role.HYPERPARAMETER, slot=slot),
    )


def _from_groups(facts: PairFacts) -> Answer:
    apart: dict[tuple[str, float, float], dict[str, int]] = defaultdict(dict)
    looked = 0
    for one, two in _both(facts):
        for slot in _HYPERPARAMETERS:
            if slot in one.first and slot in two.first:
                looked += 1
                if one.first[slot] != two.first[slot]:
                    apart[slot, one.first[slot], two.first[slot]][one.fqn] = 0
    skipped = "no step recorded what the optimizer applied" + (": its groups were compared" if looked else "")
    findings = tuple(_number(slot, a, b, found) for (slot, a, b), found in apart.items())
    return Answer(exercised=looked, findings=findings, failed=len(findings), skipped=skipped)


_PROPERTIES: tuple[tuple[str, str, Callable[[ParameterRow], Any], str], ...] = (
    (
        "model.frozen_parameter",
        "are trained in one run only",
        lambda row: "trained" if row.trainable else "frozen",
        "set requires_grad alike (--freeze-*, LoRA targets)",
    ),
    (
        "optimizer.master_dtype",
        "are updated in another dtype",
        lambda row: row.master or row.dtype,
        "use the same master weights (--main-params-dtype, the optimizer's float16 wrapper)",
    ),
    (
        "model.tied_weights",
        "are tied otherwise",
        lambda row: ", ".join(row.tied) or "nothing",
        "use the same --untie-embeddings-and-output-weights",
    ),
)


@pair_check(
    *(id_ for id_, _, _, _ in _PROPERTIES),
    holds="every parameter is trained or frozen, updated in one dtype and tied alike in both runs",
    unit="parameters",
)
def properties(facts: PairFacts) -> Answer:
    """Compare what a parameter is, beside its numbers."""
    both = _both(facts)
    findings = []
    for id_, what, get, remedy in _PROPERTIES:
        lines = [
            (one.fqn, f"{get(one)} in the baseline, {get(two)} in the candidate")
            for one, two in both
            if get(one) != get(two) and _comparable(facts, id_, one, two)
        ]
        if lines:
            findings.append(_finding(id_, f"{count(len(lines), 'parameter')} {what}", lines, remedy))
    skipped = "" if both else "no run declared its parameters"
    return Answer(exercised=len(both), findings=tuple(findings), skipped=skipped)


def _comparable(facts: PairFacts, id_: str, one: ParameterRow, two: ParameterRow) -> bool:
    if id_ == "optimizer.master_dtype":
        return bool(one.grouped and two.grouped) and bool(one.first and two.first)
    # stages that keep copies equal are tied by the layout
    return id_ != "model.tied_weights" or not facts.other_layout


def _finding(id_: str, title: str, lines: Sequence[tuple[str, str]], remedy: str) -> Finding:
    return Finding(
        id=id_,
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"{title}: {listed([fqn for fqn, _ in lines], 3)}",
        evidence=shortened([f"{fqn}: {said}" for fqn, said in lines]),
        remedy=remedy,
        where=RecordKey(step=0, phase=Phase.OPTIMIZER, fqn=lines[0][0], role=Role.PARAM),
    )


def group_lines(facts: PairFacts, *, every: bool) -> tuple[str, ...]:
    """Return the two sides parameter by parameter, as a table.

    Args:
        facts: the runs.
        every: also the rows that do not differ.
    """
    one, two = facts.rows[Side.BASELINE], facts.rows[Side.CANDIDATE]
    names = list(dict.fromkeys([*facts.row_names(Side.BASELINE), *facts.row_names(Side.CANDIDATE)]))
    rows = [(fqn, cells_of(one.get(fqn)), cells_of(two.get(fqn))) for fqn in names]
    shown = [row for row in rows if every or row[1] != row[2]]
    if not shown:
        return ()
    head = ("parameter", "", *COLUMNS)
    lines: list[tuple[str, ...]] = [head]
    for fqn, left, right in shown:
        if left == right:
            lines.append((fqn, "both", *left))
            continue
        lines.append((fqn, "baseline", *left))
        lines.append(("", "candidate", *(b if a != b else "=" for a, b in zip(left, right, strict=True))))
    same = len(rows) - len(shown)
    note = [(f"{count(same, 'parameter', 'are')} the same on both sides (--all shows them)",)] if same else []
    return (*_aligned(lines), *(text for (text,) in note))


COLUMNS = ("shape", "dtype", "master", "trained", "groups", "wd_mult", "lr_mult", "weight_decay", "lr",
            "eps", "beta1", "beta2", "step", "tied to")  # fmt: skip


def cells_of(row: ParameterRow | None) -> tuple[str, ...]:
    """Return how a parameter is trained, as texts under ``COLUMNS``."""
    if row is None:
        return ("absent", *("",) * (len(COLUMNS) - 1))
    groups = "?" if row.grouped is None else str(row.times or int(row.grouped))
    numbers = (
        *(row.multipliers.get(name) for name in ("wd_mult", "lr_mult")),
        *(row.first.get(name) for name in ("weight_decay", "lr", "eps", "beta1", "beta2", "step")),
    )
    return (
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype,
        row.master or "-",
        "yes" if row.trainable else "no",
        groups,
        *("-" if number is None else f"{float(number):.6g}" for number in numbers),
        ", ".join(row.tied) or "-",
    )


def _aligned(lines: Iterable[Sequence[str]]) -> list[str]:
    known = [tuple(line) for line in lines]
    widths = [max(len(line[column]) for line in known) for column in range(len(known[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in known
    ]
