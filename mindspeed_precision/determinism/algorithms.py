"""Switches inside a framework that decide whether an operation repeats, and a watch over them.

TF32 is left as it is: it changes results but not their repeatability, so it is for the user to decide; it is
recorded and compared between runs, and put back like the others when it changes while training runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.backends.detect import TORCH, loaded_framework
from mindspeed_precision.config import DeterminismSettings
from mindspeed_precision.determinism import witness
from mindspeed_precision.errors import DeterminismError


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One global switch of a framework.

    Attributes:
        name: as it is reported.
        read: returns its value, given the framework's module.
        write: sets its value, given the module and the value.
    """

    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


def _set_deterministic(torch: Any, enabled: bool) -> None:
    torch.use_deterministic_algorithms(
        enabled, warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _set_warn_only(torch: Any, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)


def _attribute(name: str, path: str) -> Switch:
    """A switch that is the attribute ``path`` of torch."""
    *owners, last = path.split(".")

    def owner(torch: Any) -> Any:
        for step in owners:
            torch = getattr(torch, step)
        return torch

    def write(torch: Any, value: Any) -> None:
        setattr(owner(torch), last, value)

    return Switch(name=name, read=lambda torch: getattr(owner(torch), last), write=write)


TORCH_SWITCHES: tuple[Switch, ...] = (
    Switch(
        name="deterministic_algorithms",
        read=lambda torch: torch.are_deterministic_algorithms_enabled(),
        write=_set_deterministic,
    ),
    Switch(
        name="deterministic_warn_only",
        read=lambda torch: torch.is_deterministic_algorithms_warn_only_enabled(),
        write=_set_warn_only,
    ),
    _attribute("fill_uninitialized_memory", "utils.deterministic.fill_uninitialized_memory"),
    _attribute("cudnn_deterministic", "backends.cudnn.deterministic"),
    _attribute("cudnn_benchmark", "backends.cudnn.benchmark"),
    _attribute("cudnn_allow_tf32", "backends.cudnn.allow_tf32"),
    Switch(
        name="float32_matmul_precision",
        read=lambda torch: torch.get_float32_matmul_precision(),
        write=lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
)
"""Every switch of torch, in the order in which they are put back."""

MINDSPORE_SWITCHES: tuple[Switch, ...] = (
    Switch(
        name="deterministic_algorithms",
        read=lambda mindspore: mindspore.get_context("deterministic") == "ON",
        write=lambda mindspore, enabled: mindspore.set_deterministic(bool(enabled)),
    ),
)
"""Every switch of MindSpore, also where a ``torch`` stands on it: its own switches end here."""


def _switches() -> tuple[Any, tuple[Switch, ...]]:
    """Return the framework that is loaded, and its switches; none where none is."""
    framework = loaded_framework()
    if framework is None:
        return None, ()
    if framework == TORCH:
        return sys.modules["torch"], TORCH_SWITCHES
    return sys.modules["mindspore"], MINDSPORE_SWITCHES


@dataclass(frozen=True, kw_only=True)
class Change:
    """A switch that somebody changed while training ran; it has been put back.

    Attributes:
        name: the switch.
        found: its value.
        expected: what it had been pinned to, and is again.
        culprit: ``file:line in function`` of the call that changed it; empty when nobody saw one.
    """

    name: str
    found: Any
    expected: Any
    culprit: str = ""

    def describe(self) -> str:
        """Return the change as one sentence."""
        who = self.culprit or "somebody who did not call a function that is watched"
        return f"{self.name} was changed from {self.expected!r} to {self.found!r} by {who}"


def pin_algorithms(settings: DeterminismSettings) -> dict[str, Any]:
    """Pin the switches of the framework that is loaded, if one is.

    MindSpore is also made to wait for every operator (``launch_blocking``): otherwise an error surfaces at a
    later, unrelated operator. It cannot be asked whether it waits, so that is not watched.

    Args:
        settings: ``fill_uninitialized_memory`` decides that switch; the others are always pinned.

    Raises:
        DeterminismError: strict, and the framework refuses to turn a switch any more.

    Returns:
        Every switch as it is now; for ``reassert``. Empty when no framework is loaded.
    """
    framework, switches = _switches()
    if not switches:
        return {}
    pinned = wanted(settings)
    with witness.looking_away():
        for switch in switches:
            if switch.name in pinned and switch.read(framework) != pinned[switch.name]:
                _turn(switch, framework, pinned[switch.name], strict=settings.strict)
        if switches is MINDSPORE_SWITCHES:
            framework.runtime.launch_blocking()
    witness.forget()
    return snapshot()


def wanted(settings: DeterminismSettings) -> dict[str, Any]:
    """Return what each pinned switch is to be, by its name."""
    return {
        "deterministic_algorithms": True,
        "deterministic_warn_only": False,
        "fill_uninitialized_memory": settings.fill_uninitialized_memory,
        "cudnn_deterministic": True,
        "cudnn_benchmark": False,
    }


def _turn(switch: Switch, framework: Any, value: Any, *, strict: bool) -> None:
    """Turn a switch; MindSpore's may be set once per process, by whoever comes first."""
    try:
        switch.write(framework, value)
    except RuntimeError as error:
        if strict:
            raise DeterminismError(
                what=f"{switch.name} cannot be set any more: {' '.join(str(error).split())}",
                where="determinism",
                found=repr(switch.read(framework)),
                expected=repr(value),
                remedy="let the program leave it alone, or accept it with determinism.strict=false",
            ) from error


def snapshot() -> dict[str, Any]:
    """Return every switch as it is now; empty when no framework is loaded."""
    framework, switches = _switches()
    return {switch.name: switch.read(framework) for switch in switches}


def reassert(expected: Mapping[str, Any]) -> list[Change]:
    """Put back every switch that is no longer as ``expected``, and say who changed it.

    Meant to be called at each step: a library may turn a strict switch into a warning without a word.

    Args:
        expected: what ``pin_algorithms`` or ``snapshot`` returned.
    """
    framework, switches = _switches()
    changes = []
    for switch in switches:
        if switch.name not in expected:
            continue
        found = switch.read(framework)
        if found != expected[switch.name]:
            changes.append(
                Change(
                    name=switch.name,
                    found=found,
                    expected=expected[switch.name],
                    culprit=witness.culprit_of(switch.name),
                )
            )
    with witness.looking_away():
        for switch in switches:
            if any(change.name == switch.name for change in changes):
                switch.write(framework, expected[switch.name])
    witness.forget()
    return changes
