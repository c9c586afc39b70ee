"""Whether two runs can be compared at all, and on which ranks and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import IncomparableError
from mindspeed_precision.records import INIT_STEP, ParameterDeclaration

_SHOWN = 3

_OWN_SWITCHES = {
    "environment": ("OMP_*", "MKL_*", "ONEDNN_*", "DNNL_*", "NVTE_*", "TORCHDYNAMO_*", "TASK_QUEUE_*"),
    "numerics": ("num_threads", "mkldnn", "cpu_capability", "device"),
}
"""What two frameworks take differently even where they have it both: it says nothing across them."""


def different_frameworks(baseline: Run, candidate: Run) -> bool:
    """Tell whether two frameworks computed the runs; runs whose manifests do not say are taken for alike."""
    return bool(baseline.framework and candidate.framework) and baseline.framework != candidate.framework


def other_tool(*runs: Run) -> str:
    """Return the name of a tool that recorded one of the runs where it is not this one; empty for none."""
    return next((str(run.manifest["recorded_by"]) for run in runs if run.manifest.get("recorded_by")), "")


def comparable(baseline: Run, candidate: Run, section: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return a section of both manifests; of two frameworks only what both have and read in the same way."""
    one, two = (_section(run, section) for run in (baseline, candidate))
    if not different_frameworks(baseline, candidate):
        return one, two
    own = _OWN_SWITCHES.get(section, ())
    common = [n for n in one if n in two and not any(fnmatchcase(n, pattern) for pattern in own)]
    return {name: one[name] for name in common}, {name: two[name] for name in common}


def _section(run: Run, name: str) -> Mapping[str, Any]:
    found = run.manifest.get(name)
    return found if isinstance(found, dict) else {}


def foreign_notes(baseline: Run, candidate: Run) -> list[str]:
    """Say what is not compared between runs of different frameworks."""
    if not different_frameworks(baseline, candidate):
        return []
    return [
        f"{_framework(baseline)} in the baseline, {_framework(candidate)} in the candidate: versions, and "
        "switches and environment variables of one framework alone, are not compared"
    ]


def _framework(run: Run) -> str:
    found = run.manifest["framework"]
    return f"{found['name']} {found.get('version', '')}".strip()


def common_ranks(baseline: Run, candidate: Run) -> tuple[list[int], list[str]]:
    """Return the ranks that both runs recorded, ascending, and a note for those of one run only.

    Raises:
        IncomparableError: there is none.
    """
    common = sorted(baseline.ranks.keys() & candidate.ranks.keys())
    if not common:
        raise IncomparableError(
            "no rank was recorded by both runs",
            where=f"{baseline.path} and {candidate.path}",
            found=f"ranks {numbers_text(sorted(candidate.ranks))}",
            expected=f"ranks {numbers_text(sorted(baseline.ranks))}",
            remedy="record the same ranks in both runs (setting `ranks`)",
        )
    notes = [
        f"only the {side} recorded ranks {numbers_text(alone)}: not compared"
        for side, alone in _one_sided(baseline.ranks.keys(), candidate.ranks.keys())
    ]
    return common, notes


def common_steps(baseline: Run, candidate: Run, ranks: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the training steps that are whole on all ``ranks`` of both runs, and a note for the others.

    Raises:
        IncomparableError: there is none.
    """
    whole = [_whole_steps(run, ranks) for run in (baseline, candidate)]
    common = sorted(whole[0] & whole[1])
    if not common:
        raise IncomparableError(
            "no step is whole in both runs",
            where=f"{baseline.path} and {candidate.path}",
            found=f"steps {numbers_text(sorted(whole[1]))}",
            expected=f"steps {numbers_text(sorted(whole[0]))}",
            remedy="record the same steps in both runs (setting `steps`), and let one step end",
        )
    notes = [
        f"{_steps(alone)} whole in the {side} only: not compared"
        for side, alone in _one_sided(whole[0], whole[1])
    ]
    for side, run in (("baseline", baseline), ("candidate", candidate)):
        seen = {step for rank in ranks for step in run.ranks[rank].steps if step != INIT_STEP}
        partial = sorted(seen - _whole_steps(run, ranks))
        if partial:
            notes.append(f"{_steps(partial)} not whole on every rank of the {side}: not compared")
    return common, notes


def _steps(numbers: Sequence[int]) -> str:
    plural = len(numbers) > 1
    return f"step{'s' if plural else ''} {numbers_text(numbers)} {'are' if plural else 'is'}"


def _whole_steps(run: Run, ranks: Sequence[int]) -> set[int]:
    steps = set.intersection(*(set(run.ranks[rank].steps) for rank in ranks))
    return steps - {INIT_STEP}


def require_same_model(baseline: Run, candidate: Run, ranks: Sequence[int]) -> None:
    """Require the same parameters, by name and shape, on every rank where both runs declare them.

    Whether a parameter is trainable, and its dtype, may differ: that is for the diagnosis.

    Raises:
        IncomparableError: the models differ; names some of the parameters.
    """
    for rank in ranks:
        one, two = (_shapes(run.ranks[rank].parameters) for run in (baseline, candidate))
        if not one or not two or one == two:
            continue
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        shown = names[:_SHOWN]
        raise IncomparableError(
            f"the runs train different models: {count(len(names), 'parameter', 'differ')} on rank {rank}",
            where=f"{baseline.path} and {candidate.path}",
            found=", ".join(_declared(name, two) for name in shown),
            expected=", ".join(_declared(name, one) for name in shown),
            remedy="where one model merely names them otherwise, say so in a file for --mapping",
        )


def _shapes(parameters: Sequence[ParameterDeclaration]) -> dict[str, tuple[int, ...]]:
    return {parameter.fqn: tuple(parameter.shape) for parameter in parameters}


def _declared(name: str, shapes: dict[str, tuple[int, ...]]) -> str:
    return f"{name}{list(shapes[name])}" if name in shapes else f"no {name}"


def _one_sided(one: Iterable[int], two: Iterable[int]) -> list[tuple[str, list[int]]]:
    left, right = set(one), set(two)
    pairs = [("baseline", sorted(left - right)), ("candidate", sorted(right - left))]
    return [(side, alone) for side, alone in pairs if alone]


def numbers_text(numbers: Sequence[int]) -> str:
    """Return numbers as a person writes them: ``0-3, 7``; ``none`` for no number."""
    return ", ".join(ranges_of(numbers)) or "none"


def ranges_of(numbers: Sequence[int]) -> list[str]:
    """Return ascending numbers as ranges: ``["0-3", "7"]``."""
    parts: list[str] = []
    start = previous = None
    for number in [*numbers, None]:
        if previous is not None and (number is None or number != previous + 1):
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = None
        start = number if start is None else start
        previous = number
    return parts
