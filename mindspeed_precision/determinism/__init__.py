"""Determinism: environment, algorithms and seeds are pinned before training, and watched while it runs.

One verb, ``pin``; then ``algorithms.reassert`` at each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_precision.backends.detect import TORCH, loaded_framework
from mindspeed_precision.config import DeterminismSettings
from mindspeed_precision.determinism import progress
from mindspeed_precision.determinism.algorithms import Change, pin_algorithms, reassert, snapshot, wanted
from mindspeed_precision.determinism.dropout import zero_dropout, zero_dropout_arguments
from mindspeed_precision.determinism.environment import Outcome, Status, pin_environment, recorded_environment
from mindspeed_precision.determinism.seeds import check_seed, seed_everything
from mindspeed_precision.errors import ConfigError, DeterminismError
from mindspeed_precision.records import Finding, Severity

__all__ = [
    "Change",
    "DeterminismReport",
    "Outcome",
    "Status",
    "change_findings",
    "pin",
    "reassert",
    "recorded_environment",
    "snapshot",
    "zero_dropout",
    "zero_dropout_arguments",
]

LAUNCHERS = {"npu": "launch/torch_npu.sh", "cuda": "launch/gpu.sh", "cpu": "launch/cpu.sh"}
"""The script that exports the environment first, by device."""
MINDSPORE_LAUNCHERS = {"npu": "launch/mindspore.sh", "cpu": "launch/mindspore_cpu.sh"}
"""The same where MindSpore computes."""


@dataclass(frozen=True, kw_only=True)
class DeterminismReport:
    """What was pinned.

    Attributes:
        outcomes: what became of every environment variable.
        switches: every switch of the framework as it is now; give it to ``reassert``.
        seeded: the generators that were seeded.
        findings: what could not be pinned, when that is no error.
    """

    outcomes: tuple[Outcome, ...] = ()
    switches: dict[str, Any]
    seeded: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def pin(settings: DeterminismSettings, *, device: str) -> DeterminismReport:
    """Pin everything that makes a run repeat, as far as it still can be.

    Args:
        settings: ``enabled`` false pins nothing; ``strict`` makes what is too late an error.
        device: ``npu``, ``cuda`` or ``cpu``: where the model is computed.

    Raises:
        ConfigError: there is no such device, or the seed is out of range.
        DeterminismError: strict, and a variable was set too late; names all of them. Only environment
            variables that could still take effect have been changed by then.
    """
    if device not in LAUNCHERS:
        raise ConfigError("no such device", where="determinism", found=device, expected=", ".join(LAUNCHERS))
    if not settings.enabled:
        return DeterminismReport(switches={})
    check_seed(settings.seed)
    outcomes = tuple(pin_environment(device, now=progress.look(device)))
    late = [outcome for outcome in outcomes if outcome.status is Status.TOO_LATE]
    if late and settings.strict:
        raise DeterminismError(
            what="; ".join(f"{outcome.name} {outcome.message}" for outcome in late),
            where="determinism",
            remedy=f"{_remedy(late, device)}, or accept it with determinism.strict=false",
        )
    switches = pin_algorithms(settings)
    refused = [name for name, value in wanted(settings).items() if switches.get(name, value) != value]
    return DeterminismReport(
        outcomes=outcomes,
        switches=switches,
        seeded=seed_everything(settings.seed) if settings.reseed else (),
        findings=(
            *(_late_finding(outcome, device) for outcome in late),
            *(_refused_finding(name, switches[name]) for name in refused),
        ),
    )


def change_findings(changes: list[Change], *, strict: bool = True) -> list[Finding]:
    """Return a finding for each switch that ``reassert`` had to put back.

    Args:
        changes: what ``reassert`` returned.
        strict: ``determinism.strict``: the findings are errors, else warnings.
    """
    return [
        Finding(
            id="determinism.switch_changed",
            severity=Severity.ERROR if strict else Severity.WARNING,
            confidence=1.0,
            title=f"{change.name} was changed while training ran, and put back",
            evidence=(change.describe(),),
            remedy="remove the call that changes it",
        )
        for change in changes
    ]


def _late_finding(outcome: Outcome, device: str) -> Finding:
    return Finding(
        id="determinism.too_late",
        severity=Severity.WARNING,
        confidence=1.0,
        title=f"{outcome.name} could not be pinned any more",
        evidence=(f"{outcome.name} {outcome.message}",),
        remedy=_remedy([outcome], device),
    )


def _refused_finding(name: str, found: Any) -> Finding:
    return Finding(
        id="determinism.too_late",
        severity=Severity.WARNING,
        confidence=1.0,
        title=f"{name} could not be pinned any more",
        evidence=(f"{name} is {found!r}, and the framework lets it be set once per process",),
        remedy="let the program leave it alone",
    )


def _remedy(late: list[Outcome], device: str) -> str:
    exports = " ".join(f"{outcome.name}={outcome.wanted}" for outcome in late)
    scripts = LAUNCHERS if loaded_framework() in (TORCH, None) else {**LAUNCHERS, **MINDSPORE_LAUNCHERS}
    return f"launch through {scripts[device]}, or export {exports} before the program starts"
