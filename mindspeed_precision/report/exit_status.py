"""The exit status that a diagnosis means."""

from __future__ import annotations

from mindspeed_precision.records import Diagnosis, Severity, Verdict


def exit_status(diagnosis: Diagnosis) -> tuple[int, str]:
    """Return 0 (aligned), 1 (diverged, or a finding of severity error) or 2 (no answer) and why."""
    errors = [finding for finding in diagnosis.findings if finding.severity is Severity.ERROR]
    if diagnosis.status is Verdict.DIVERGED or errors:
        return 1, ""
    if diagnosis.status in (Verdict.IDENTICAL, Verdict.WITHIN_TOLERANCE):
        return 0, ""
    reasons = [f.title for f in diagnosis.findings if f.id.startswith(("vacuous.", "coverage."))]
    return 2, f"not certified: {'; '.join(reasons)}"
