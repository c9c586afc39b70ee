"""The settings that make a second run keep the elements of the divergent window, and nothing else."""

from __future__ import annotations

from typing import Any

from mindspeed_precision.records import INIT_STEP, Diagnosis, Level, Origin, Phase, RecordKey, Role

_MOST = 8


def capture_window(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return a settings overlay (``capture.rules``) for the first divergent window; None without divergence.

    For dW that is the GEMM: both operands and the result of every module whose dW is an origin at that step.
    For anything else, the records of the module, or of the parameter, in that phase and its inputs.

    Returns:
        A mapping for ``--precision-debug-config``, as plain data.
    """
    first = diagnosis.first_divergence
    if first is None or first.key.step == INIT_STEP:
        return None
    same_kind = [origin for origin in diagnosis.origins if _alike(origin, first)]
    names = list(dict.fromkeys(_window_name(origin.key) for origin in same_kind))[:_MOST]
    rules = [
        {
            "fqn": name,
            "role": "*",
            "phase": first.key.phase.value,
            "steps": str(first.key.step),
            "level": Level.TENSOR.value,
        }
        for name in names
    ]
    return {"capture": {"rules": rules}}


def _alike(origin: Origin, first: Origin) -> bool:
    return origin.key.phase is first.key.phase and origin.key.step == first.key.step


def _window_name(key: RecordKey) -> str:
    """Return the name under which the operands of a record are kept: dW of a parameter has its module's."""
    about_parameter = key.fqn.endswith((".weight", ".bias"))
    if key.phase is Phase.WGRAD and key.role in (Role.WGRAD, Role.BGRAD) and about_parameter:
        return key.fqn.rpartition(".")[0]
    return key.fqn
