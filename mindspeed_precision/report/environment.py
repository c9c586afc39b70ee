"""Text for ``mindspeed-precision environment``."""

from __future__ import annotations

from collections.abc import Sequence


def environment_text(rows: Sequence[tuple[str, str]]) -> str:
    """Return one line per row, its title in a column; a title that repeats is not written again."""
    width = max(len(title) for title, _ in rows)
    titles = ["" if place and rows[place - 1][0] == title else title for place, (title, _) in enumerate(rows)]
    return "\n".join(f"{title:{width}}  {text}" for title, (_, text) in zip(titles, rows, strict=True))
