"""How a list of differences becomes findings: one for each severity, the worst first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mindspeed_precision.records import Finding, Severity

MOST = 24
"""So many lines of evidence are shown of one finding; it says how many more there are."""

_WORDS = {
    Severity.ERROR: "that change numbers",
    Severity.WARNING: "that may change numbers",
    Severity.INFO: "that do not change numbers, or are judged by what they do",
}
_CONFIDENCE = {Severity.ERROR: 0.9, Severity.WARNING: 0.5, Severity.INFO: 0.2}


def by_severity(id_: str, what: str, lines: Iterable[tuple[Severity, str]], remedy: str) -> Iterator[Finding]:
    """Yield a finding for each severity that some line has.

    Args:
        id_: of the findings.
        what: is listed, in the plural.
        lines: severity and text of each difference.
        remedy: what to do.
    """
    known = list(lines)
    for severity in Severity:
        found = [text for own, text in known if own is severity]
        if found:
            yield Finding(
                id=id_,
                severity=severity,
                confidence=_CONFIDENCE[severity],
                title=f"{len(found)} different {what} {_WORDS[severity]}",
                evidence=shortened(found),
                remedy=remedy,
            )


def shortened(lines: Sequence[str], most: int = MOST) -> tuple[str, ...]:
    """Return lines, of many the first ones and how many more there are."""
    more = len(lines) - most
    return (*lines[:most], f"and {more} more") if more > 0 else tuple(lines)


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names as a person lists them, of many the first ones."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
