"""What a page quotes of an output, held against what a command printed on this machine.

Words, names, ids and the order of a line's parts are equal. Figures are as a machine rounds: each is within a
relative tolerance of the quoted one, or the last quoted digit differs by one. A small count is thereby equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FIGURE = re.compile(r"(?<![\w.,+-])[+-]?\d+(?: \d{3}\b)*(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w+-]|\.\w)")
"""A number that is no part of a name or of a version; thousands may be apart: ``4 003``."""
PLACE = re.compile(r"\S*/?demo-[\w-]+(?=/|$)")
MARK = re.compile(r"\s+←.*$")
"""Behind a row of a table: which printed figures differ. A last digit decides that."""


@dataclass(frozen=True, kw_only=True)
class Latitude:
    """How far a figure may be from the quoted one.

    Attributes:
        relative: relative to the quoted figure.
        counts: whether figures without a fraction are held too; False where chance decides them in each run.
    """

    relative: float = 0.02
    counts: bool = True

    def holds(self, quoted: str, printed: str) -> bool:
        """Tell whether a printed figure may stand where the quoted one does."""
        if "." not in quoted and "e" not in quoted.lower() and not self.counts:
            return True
        wanted, found = (float(text.replace(" ", "")) for text in (quoted, printed))
        return abs(found - wanted) <= max(self.relative * abs(wanted), last_digit(quoted)) * (1 + 1e-9)


def last_digit(figure: str) -> float:
    """Return what one in the last digit of a figure is worth; nothing in one without a fraction."""
    mantissa, _, exponent = figure.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals or exponent else 0.0


def unknown_lines(lines: list[str], text: str, latitude: Latitude = Latitude()) -> list[str]:
    """Return the lines of which ``text`` has none with the same words and, within ``latitude``, figures.

    A line that ends with ``…`` is the beginning of one.
    """
    printed = [(words(line), figures(line)) for line in text.splitlines()]

    def said(line: str) -> bool:
        wanted, numbers = words(line), figures(line)
        beginning = wanted.removesuffix("…")
        return any(
            (known == wanted or (beginning != wanted and known.startswith(beginning)))
            and all(map(latitude.holds, numbers, found))
            for known, found in printed
        )

    return [line for line in lines if not said(line)]


def words(line: str) -> str:
    """Return a line with its figures, the mark behind it and the directory of the run left out."""
    return " ".join(FIGURE.sub("#", _settled(line)).split())


def figures(line: str) -> list[str]:
    """Return the figures of a line, as they are written."""
    return FIGURE.findall(_settled(line))


def _settled(line: str) -> str:
    return MARK.sub("", PLACE.sub("DIR", line))
