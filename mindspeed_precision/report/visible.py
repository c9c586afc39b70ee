"""Names that a run brings: what could hide or reorder text in them is written out."""

from __future__ import annotations

import unicodedata
from dataclasses import is_dataclass
from typing import Any

_HARMLESS = {"\n", "\t"}


def visible_text(text: str) -> str:
    r"""Return a text with control, format and surrogate characters as escapes (``\u202e``).

    Such characters (categories Cc, Cf, Cs, and the line and paragraph separators) turn the direction of what
    follows, or cannot be seen.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _harmless(character) else _escaped(character) for character in text)


def one_line(text: str, most: int = 0) -> str:
    """Return a text as ``visible_text`` does, on one line; of ``most`` characters, its middle left out."""
    seen = visible_text(text).replace("\n", "\\u000a").replace("\t", "\\u0009")
    if not most or len(seen) <= most:
        return seen
    return f"{seen[: most // 2]}…{seen[-(most - most // 2 - 1) :]}"


def _harmless(character: str) -> bool:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    return not hidden or character in _HARMLESS


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"


def visible(value: Any) -> Any:
    """Return plain data with every text in it made visible; what is no plain data stays as it is."""
    if type(value) is str:
        return visible_text(value)
    if isinstance(value, dict):
        return {visible(key): visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not is_dataclass(value):
        return [visible(item) for item in value]
    return value
