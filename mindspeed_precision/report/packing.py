"""Large data as text: deflated, in base64, for a page that unpacks it itself."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from mindspeed_precision.report.verdict_json import jsonable
from mindspeed_precision.report.visible import visible


def packed(data: bytes) -> str:
    """Return bytes deflated (RFC 1950) and in base64."""
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def packed_json(value: Any) -> str:
    """Return plain data as packed JSON; NaN and infinities are texts, hidden characters are written out."""
    return packed_ready(visible(jsonable(value)))


def packed_ready(value: Any) -> str:
    """Return plain data that JSON can hold, and in which every text is visible, as packed JSON."""
    return packed(json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii"))


def unpacked(text: str) -> bytes:
    """Return what was packed."""
    return zlib.decompress(base64.b64decode(text))


def embedded(value: Any) -> str:
    """Return plain data as JSON for a script element: no character in it can end the element.

    ``<``, ``>``, ``&`` and everything beyond ASCII are written as escapes.
    """
    text = json.dumps(visible(jsonable(value)), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
