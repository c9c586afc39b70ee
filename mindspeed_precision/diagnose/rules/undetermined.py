"""The last rule: an origin that nothing accounts for is said to be one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mindspeed_precision.diagnose.facts import Facts, names
from mindspeed_precision.diagnose.rules.registry import late_rule, unexplained
from mindspeed_precision.records import Finding, Severity


@late_rule("diagnosis.unknown")
def unknown(facts: Facts, findings: Sequence[Finding]) -> Iterable[Finding]:
    """Report origins without a known cause, with the window in which to look."""
    keys = unexplained(facts, findings)
    if keys:
        first = keys[0]
        yield Finding(
            id="diagnosis.unknown",
            severity=Severity.ERROR,
            confidence=0.0,
            title=f"no rule supports a cause for {len(keys)} of {len(facts.origins)} origins",
            evidence=(
                f"window: {first.describe()}",
                f"it concerns {names(key.fqn or '(model)' for key in keys)}",
            ),
            remedy="rerun both runs with the elements of the window kept: "
            "--precision-debug-config refine.yaml",
            where=first,
            explains=tuple(keys),
        )
