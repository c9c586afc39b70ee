"""The settings that make a second run keep the elements of the divergent window, and nothing else."""

from __future__ import annotations

from typing import Any

from mindspeed_precision.records import INIT_STEP, Diagnosis, Finding, Level, Origin, Phase, RecordKey, Role

_MOST = 8


def capture_window(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return a settings overlay (``capture.rules``) for the first divergent window; None without divergence.

    For dW that is the GEMM: both operands and the result of every module whose dW is an origin at that step.
    For an accumulation main_grad before and after it, and dW as it arrived; for a gradient that flows back,
    the gradients of the module and of those beside it. For anything else, the records of the module, or of
    the parameter, in that phase.

    Returns:
        A mapping for ``--precision-debug-config``, as plain data.
    """
    first = diagnosis.first_divergence
    if first is None or first.key.step == INIT_STEP:
        return None
    same_kind = [origin for origin in diagnosis.origins if _alike(origin, first)]
    suspected = [finding.where for finding in diagnosis.findings if _unproved(finding)]
    keys = [key for key in (*suspected, *(origin.key for origin in same_kind)) if key is not None]
    windows = list(dict.fromkeys((key.step, _window(key)) for key in keys))[:_MOST]
    kept = dict.fromkeys((step, *place) for step, places in windows for place in places)
    rules = [
        {"fqn": name, "role": "*", "phase": phase.value, "steps": str(step), "level": Level.TENSOR.value}
        for step, name, phase in kept
    ]
    return {"capture": {"rules": rules}}


def _unproved(finding: Finding) -> bool:
    """Tell whether a finding names a record, perhaps before the first divergence, to be looked at."""
    return finding.id.startswith("layout.noncontiguous") and not finding.proved_by_replay


def _alike(origin: Origin, first: Origin) -> bool:
    return origin.key.phase is first.key.phase and origin.key.step == first.key.step


def _window(key: RecordKey) -> tuple[tuple[str, Phase], ...]:
    """Return names and phases under which a record, and what it was computed of, are kept."""
    owner = key.fqn.rpartition(".")[0]
    if key.phase is Phase.WGRAD and key.role in (Role.WGRAD, Role.BGRAD):
        about_parameter = key.fqn.endswith((".weight", ".bias"))
        return ((owner if about_parameter else key.fqn, key.phase),)
    if key.phase is Phase.ACCUMULATE:
        return (key.fqn, key.phase), (key.fqn, Phase.WGRAD)
    if key.phase is Phase.DGRAD and owner:  # what its neighbours sent back is what it was made of
        return (key.fqn, key.phase), (f"{owner}.*", key.phase)
    return ((key.fqn, key.phase),)
