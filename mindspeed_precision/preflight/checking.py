"""``preflight``: ask everything of one launch, before it is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mindspeed_precision.launches import read_launch
from mindspeed_precision.preflight import environment, versions, words
from mindspeed_precision.preflight.planned import Planned, plan
from mindspeed_precision.preflight.rules import ask, rules
from mindspeed_precision.records import Examination, Finding
from mindspeed_precision.redaction import redact_text
from mindspeed_precision.verify.registry import Checks

PREFLIGHT: Checks[Planned] = Checks()

_HOLD = {
    "config.contradiction": "no two arguments contradict each other",
    "config.ignored": "no argument is ignored or overridden",
    "config.incomplete_resume": "a checkpoint holds, and gives back, what a training goes on with",
    "config.indivisible": "sizes that are split divide evenly",
    "config.implicit": "nothing that decides numbers follows from the number of ranks",
    "determinism.dropout": "dropout is off",
    "determinism.data_order": "samples come in an order that another run can repeat",
    "determinism.algorithms": "algorithms that repeat were asked for",
    "determinism.asynchronous": "nothing moves while something else computes",
    "determinism.fusion": "operators are the ones that the other side has",
}


def _register() -> None:
    """Register what looks at the environment and the words, then the rules by the finding that they give."""
    register = PREFLIGHT.register
    register(
        "determinism.environment",
        "determinism.too_late",
        holds="the variables that make a run repeat are set in time",
        unit="variables",
    )(environment.switches)
    register("env.not_in_effect", holds="what is set takes effect", unit="variables")(environment.in_time)
    register("env.sourced_toolkit", holds="no toolkit overwrites it", unit="launches")(
        environment.sourced_after
    )
    register("env.versions_incompatible", holds="installed packages go together", unit="rules")(
        versions.versions
    )
    register("config.repeated_argument", holds="each setting is given once", unit="settings")(words.repeated)
    register("config.unknown_argument", holds="arguments are spelled right", unit="arguments")(
        words.misspelled
    )
    register(
        "config.stray_words", "config.unset_variable", holds="each word belongs to an argument", unit="words"
    )(words.stray)
    for id_ in dict.fromkeys(rule.id for rule in rules()):
        chosen = tuple(rule for rule in rules() if rule.id == id_)
        register(id_, holds=_HOLD[id_], unit="rules")(partial(ask, chosen))


_register()


def preflight(
    launch: Sequence[str], *, backend: str | None = None, environment: Mapping[str, str] | None = None
) -> Examination:
    """Examine a launch without starting anything or importing a framework.

    Args:
        launch: command, script or arguments (``launches.read_launch``); empty: the environment alone.
        backend: ``pta``, ``mindspore``, ``cuda`` or ``cpu``; None: from the launch or what is installed.
        environment: with which it would be started; None: this process's.

    Returns:
        The findings, worst first, and how many things each check looked at.

    Raises:
        ConfigError: the launch cannot be read, or there is no such backend.
    """
    read = read_launch(launch or ["--"], environment)
    planned = plan(read, backend)
    findings, outcomes = PREFLIGHT.ask_all(planned)
    world = read.world_size
    return Examination(
        command="preflight",
        subjects={"launch": redact_text(read.source), "backend": f"{planned.backend} ({planned.chosen})"},
        findings=tuple(map(_shown, findings)),
        outcomes=outcomes,
        notes=(
            f"backend: {planned.backend} ({planned.chosen})",
            f"processes: {'not known' if world is None else world}; read from {redact_text(read.source)}",
        ),
        tables={"versions": tuple(f"{name} {version}" for name, version in planned.versions.items())},
    )


def _shown(finding: Finding) -> Finding:
    return replace(
        finding,
        title=redact_text(finding.title),
        evidence=tuple(map(redact_text, finding.evidence)),
        remedy=redact_text(finding.remedy),
    )
