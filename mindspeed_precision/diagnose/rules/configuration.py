"""Rules about what the two runs say of themselves: configuration, environment, versions, numerics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mindspeed_precision.align.compatible import comparable, different_frameworks, other_tool
from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.diagnose.rules.registry import rule
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.meanings import Effect, Meaning, load_meanings, without_framework
from mindspeed_precision.records import INIT_STEP, Finding, Phase, Severity

_MOST = 12


def _decides(meaning: Meaning | None) -> bool:
    """Tell whether a difference of that meaning may change numbers; of what no table knows it may."""
    return meaning is None or meaning.effect is not Effect.CANNOT


def _argument_decides(name: str) -> bool:
    return _decides(load_meanings().argument(name))


def _variable_decides(name: str) -> bool:
    return _decides(load_meanings().variable(name))


def _any(name: str) -> bool:
    return True


def _places_tensors(name: str) -> bool:
    """Tell whether an argument places tensors over ranks: where the layouts differ it says nothing more."""
    meaning = load_meanings().argument(name)
    return meaning is not None and meaning.judged_by == "layout"


@rule("config.microbatches_differ")
def microbatches(facts: Facts) -> Iterable[Finding]:
    """Say where a step has another number of microbatches: its losses and gradients are other sums.

    They are counted over all data-parallel ranks, which may be more of them in one run than in the other.
    """
    for step in facts.alignment.steps:
        for rank in facts.alignment.ranks:
            one, two = (_microbatches(run, rank, step) for run in (facts.baseline, facts.candidate))
            if one == two or None in (one, two):  # a dump of operations alone does not say
                continue
            yield Finding(
                id="config.microbatches_differ",
                severity=Severity.ERROR,
                confidence=0.97,
                title=f"a step has {one} microbatches in the baseline and {two} in the candidate",
                evidence=(f"first: step {step}, rank {rank}",),
                remedy="use the same global and micro batch size, and the same ramp-up",
                explains=tuple(o.key for o in facts.origins if o.key.step >= step),
            )
            return


def _microbatches(run: Run, rank: int, step: int) -> int | None:
    own = run.ranks[rank].microbatches.get(step)
    return None if own is None else own * run.ranks[rank].coordinates.dp_size


@rule("config.vocabulary_padding")
def vocabulary(facts: Facts) -> Iterable[Finding]:
    """Say that the vocabulary is padded otherwise, where something differs after the initial parameters.

    Megatron's loss (``vocab_parallel_cross_entropy``) sums the exponentials of all logits, those of padding
    too: it and every gradient are other numbers, by as much as the padding's share of the softmax.
    """
    padding = facts.alignment.padding
    later = tuple(origin.key for origin in facts.origins if origin.key.step != INIT_STEP)
    if padding is None or not later:
        return
    one, two = padding.rows
    yield Finding(
        id="config.vocabulary_padding",
        severity=Severity.ERROR,
        confidence=0.9 if all(key.phase is not Phase.FPROP for key in later) else 0.6,
        title=f"{padding.text}: Megatron's softmax sums over all of them, so that the loss and all "
        "gradients differ",
        evidence=(
            f"entries of the vocabulary: {padding.size or 'not known'}",
            f"at uniform logits the loss differs by log({max(one, two)}/{min(one, two)}) = "
            f"{math.log(max(one, two) / min(one, two)):.2e}",
        ),
        remedy="pad both alike: choose --make-vocab-size-divisible-by so that its product with the "
        "tensor-parallel size is the same in both runs",
        explains=later,
    )


@rule("config.perturbed")
def perturbed(facts: Facts) -> Iterable[Finding]:
    """Say that a run was given noise on purpose: it is for ``compare --calibrate``, not to be judged."""
    said = [
        f"the {side}: {run.perturbed}"
        for side, run in (("baseline", facts.baseline), ("candidate", facts.candidate))
        if run.perturbed
    ]
    if said:
        yield Finding(
            id="config.perturbed",
            severity=Severity.ERROR,
            confidence=0.99,
            title="a run began with perturbed parameters: its differences are wanted",
            evidence=tuple(said),
            remedy="give it to `compare BASELINE CANDIDATE --calibrate RUN`, and compare runs without noise",
            explains=tuple(origin.key for origin in facts.origins),
        )


@rule("config.differs")
def configuration(facts: Facts) -> Iterable[Finding]:
    """List the arguments that decide numbers and differ."""
    if other_tool(facts.baseline, facts.candidate):
        return  # its dump says nothing of the configuration, and says so
    one, two = (_arguments(run) for run in (facts.baseline, facts.candidate))
    if _foreign(facts):
        one, two = ({name: _of_any(value) for name, value in found.items()} for found in (one, two))
    if facts.alignment.layouts:
        one, two = (
            {name: value for name, value in found.items() if not _places_tensors(name)}
            for found in (one, two)
        )
    yield from _differences(
        facts,
        id_="config.differs",
        what="arguments that decide numbers",
        lines=_lines(one, two, _argument_decides),
        remedy="make the arguments equal, or know why they are not",
    )


def _of_any(value: Any) -> Any:
    return without_framework(value) if isinstance(value, str) else value


def _arguments(run: Run) -> Mapping[str, Any]:
    """Return Megatron's arguments, or where a run has none its configuration objects as one table."""
    config = run.manifest.get("config", {})
    sections = ("optimizer_config", "ddp_config", "transformer_config", "megatron_args")
    merged: dict[str, Any] = {}
    for section in sections:
        found = config.get(section) if isinstance(config, dict) else None
        merged |= found if isinstance(found, dict) else {}
    return merged


@rule("env.differs")
def environment(facts: Facts) -> Iterable[Finding]:
    """List the environment variables, and the switches of the framework, that decide numbers and differ."""
    lines = [
        line
        for name, decides in (("environment", _variable_decides), ("numerics", _any))
        for line in _lines(*comparable(facts.baseline, facts.candidate, name), decides)
    ]
    yield from _differences(
        facts,
        id_="env.differs",
        what="settings of the environment that decide numbers",
        lines=lines,
        remedy="launch both runs with the same environment (launch/*.sh)",
    )


@rule("env.versions_differ")
def versions(facts: Facts) -> Iterable[Finding]:
    """List the packages of which the runs used different versions."""
    if other_tool(facts.baseline, facts.candidate):
        return
    if _foreign(facts):
        return  # that they differ is the question, not a finding: a note of the alignment names them
    lines = _lines(_section(facts.baseline, "versions"), _section(facts.candidate, "versions"), _any)
    lines += _lines(_section(facts.baseline, "framework"), _section(facts.candidate, "framework"), _any)
    yield from _differences(
        facts,
        id_="env.versions_differ",
        what="versions",
        lines=lines,
        remedy="use the same versions where bits must agree",
    )


def _foreign(facts: Facts) -> bool:
    return different_frameworks(facts.baseline, facts.candidate)


def _section(run: Run, name: str) -> Mapping[str, Any]:
    found = run.manifest.get(name)
    return found if isinstance(found, dict) else {}


def _lines(one: Mapping[str, Any], two: Mapping[str, Any], decides: Callable[[str], bool]) -> list[str]:
    """Return ``name: a in the baseline, b in the candidate`` for the entries that differ.

    An entry that one side lacks counts only where the other one has a table of its own to lack it from.
    """
    if not one or not two:
        return []
    return [
        f"{name}: {_value(one, name)} in the baseline, {_value(two, name)} in the candidate"
        for name in sorted({*one, *two})
        if one.get(name) != two.get(name) and decides(name)
    ]


def _value(section: Mapping[str, Any], name: str) -> str:
    return str(section[name]) if name in section else "not set"


def _differences(facts: Facts, *, id_: str, what: str, lines: list[str], remedy: str) -> Iterable[Finding]:
    if lines:
        shown = [*lines[:_MOST], *([f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else [])]
        yield Finding(
            id=id_,
            severity=Severity.WARNING if facts.origins else Severity.INFO,
            confidence=0.3 if facts.origins else 0.1,
            title=f"different {what}",
            evidence=tuple(shown),
            remedy=remedy,
        )
