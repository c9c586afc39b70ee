"""The words of a launch themselves: given twice, misspelled, or behind what takes no value."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from mindspeed_precision.launches import Argument
from mindspeed_precision.preflight.planned import Planned
from mindspeed_precision.records import Finding, Severity
from mindspeed_precision.verify.registry import Answer

_PLACEHOLDER = re.compile(r"\$[({\w]")


def repeated(planned: Planned) -> Answer:
    """Look for settings that are given more than once; the last one counts."""
    given: dict[str, list[Argument]] = defaultdict(list)
    for argument in planned.launch.arguments.given:
        given[argument.setting].append(argument)
    findings = []
    for several in given.values():
        shown = [" ".join(argument.words) for argument in several]
        if len(several) < 2:
            continue
        differ = (
            len(
                {
                    (argument.name in planned.launch.arguments.known.negations, argument.values)
                    for argument in several
                }
            )
            > 1
        )
        findings.append(
            Finding(
                id="config.repeated_argument",
                severity=Severity.WARNING if differ else Severity.INFO,
                confidence=1.0,
                title=f"--{several[-1].name} is given {len(several)} times"
                + (", with different values" if differ else ""),
                evidence=(f"in this order: {', '.join(shown)}; the last one counts",),
                remedy=f"leave one: {shown[-1]}",
            )
        )
    return Answer(exercised=len(given), findings=tuple(findings), skipped=_none(given))


def misspelled(planned: Planned) -> Answer:
    """Look for arguments that no known program has, and that look like one that it has."""
    arguments = planned.launch.arguments
    findings, strange = [], []
    for argument in arguments.given:
        if argument.name in arguments.known.values:
            continue
        closest = arguments.known.closest(argument.name)
        if not closest:
            strange.append(f"--{argument.name}")
            continue
        findings.append(
            Finding(
                id="config.unknown_argument",
                severity=Severity.WARNING,
                confidence=0.8,
                title=f"--{argument.name} is not known: --{closest} is",
                evidence=(
                    f"--{closest} belongs to {arguments.known.owners[closest]}; a script may have its own",
                ),
                remedy=f"write --{closest}, if that is meant",
            )
        )
    if strange:
        findings.append(
            Finding(
                id="config.unknown_argument",
                severity=Severity.INFO,
                confidence=0.5,
                title=f"{len(strange)} arguments are neither Megatron's nor MindSpeed's",
                evidence=(", ".join(dict.fromkeys(strange)),),
            )
        )
    return Answer(exercised=len(arguments.given), findings=tuple(findings), skipped=_none(arguments.given))


def stray(planned: Planned) -> Answer:
    """Look for words that belong to no argument, and for values that a shell would still have to fill in."""
    arguments = planned.launch.arguments
    findings = []
    if arguments.stray:
        findings.append(
            Finding(
                id="config.stray_words",
                severity=Severity.ERROR,
                confidence=0.9,
                title="words of the command belong to no argument",
                evidence=(f"{_quoted(arguments.stray)}: the parser of the script refuses them",),
                remedy="a switch takes no value; a path with blanks needs quotes where it is used",
            )
        )
    unset = [argument for argument in arguments.given if any(map(_PLACEHOLDER.search, argument.values))]
    if unset:
        findings.append(
            Finding(
                id="config.unset_variable",
                severity=Severity.INFO,
                confidence=0.7,
                title="arguments whose value could not be read: nothing about them was decided",
                evidence=tuple(" ".join(argument.words) for argument in unset),
                remedy="set the variable, or give the command itself",
            )
        )
    return Answer(
        exercised=len(planned.launch.words()), findings=tuple(findings), skipped=_none(planned.launch.words())
    )


def _quoted(words: Sequence[str]) -> str:
    return ", ".join(repr(word) for word in words[:8]) + (" …" if len(words) > 8 else "")


def _none(given: object) -> str:
    return "" if given else "no arguments were given"
