"""Ways to spoil a file: its bytes, its lines, values of a JSON document; drawn by hypothesis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

HUGE = 10**12
NASTY_VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, HUGE, 10**30, 10**400, -(2**63), 0.5, 1e308, -0.0,
    "", "0", "nan", "-inf", "../../outside", "/etc/hostname", "\x00", "\ud800", "ä" * 100, "x" * 3000,
    "${oc.env:HOME}", "<script>alert(1)</script>", [], {}, [[]], [{}], {"": {}}, [0] * 300, [HUGE],
    {"schema": 1}, "float32", "bfloat16",
]  # fmt: skip
NASTY_BYTES = [
    b"", b"\n", b"\x00", b"\xff\xfe", b"{", b"}", b"[" * 2000, b"]", b'"', b",", b":", b"-", b"1e999", b"NaN",
    b"1" * 5000, b"\xef\xbb\xbf", b"&a *a", b"&a [*a]", b"*x", b"!!python/object/apply:os.system ['true']",
    b"!!python/name:os.system", b"${oc.env:HOME}", b"${file}", b"$(touch spoilt)", b"`touch spoilt`", b"\\\n",
    b"'", b"${", b"<<EOF\n", b"---\n", b"? ", b"- ", b"  ", b"\t", b"# ", b"../", b"|\n", b">-\n",
    b"%YAML 9\n",
    b"while :; do :; done\n", b"source /dev/zero\n", b". ./launch.sh\n", b"x=$x$x$x$x\n", b"{1..1000000000}",
    HUGE.to_bytes(8, "little"), (2**63).to_bytes(8, "little"), (300).to_bytes(8, "little"),
]  # fmt: skip

Spoil = tuple[Any, ...]

_position = st.integers(0, 2**16)
_bytes = st.one_of(st.sampled_from(NASTY_BYTES), st.binary(max_size=12))
_value = st.one_of(
    st.sampled_from(NASTY_VALUES),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)
_one = st.one_of(
    st.tuples(st.just("splice"), _position, st.integers(0, 40), _bytes),
    st.tuples(st.just("cut"), _position),
    st.tuples(st.just("line"), _position, _position, st.sampled_from(["drop", "twice", "swap"])),
    st.tuples(st.just("value"), _position, _position, _value),
    st.tuples(st.just("key"), _position, _position, st.sampled_from(["drop", "add", "rename"])),
)
SPOILS = st.lists(_one, min_size=1, max_size=3)


def spoil(data: bytes, spoils: list[Spoil]) -> bytes:
    """Return ``data``, spoilt."""
    for kind, *words in spoils:
        data = _KINDS[kind](data, *words)
    return data


def _splice(data: bytes, at: int, removed: int, put: bytes) -> bytes:
    at %= len(data) + 1
    return data[:at] + put + data[at + removed :]


def _cut(data: bytes, at: int) -> bytes:
    return data[: at % (len(data) + 1)]


def _line(data: bytes, at: int, other: int, how: str) -> bytes:
    lines = data.split(b"\n")
    at, other = at % len(lines), other % len(lines)
    if how == "drop":
        del lines[at]
    elif how == "twice":
        lines.insert(at, lines[other])
    else:
        lines[at], lines[other] = lines[other], lines[at]
    return b"\n".join(lines)


def _in_document(data: bytes, line: int, change: Any) -> bytes:
    """Change the JSON document in ``data``: all of it, one of its lines, or the header of a payload."""
    header = len(data) > 8 and data[8:9] == b"{"
    if header:
        length = int.from_bytes(data[:8], "little")
        changed = _in_document(data[8 : 8 + length], 0, change)
        return len(changed).to_bytes(8, "little") + changed + data[8 + length :]
    for lines in ([data], data.split(b"\n")):
        at = line % len(lines)
        try:
            document = json.loads(lines[at])
        except (ValueError, RecursionError):
            continue
        lines[at] = json.dumps(change(document)).encode("utf-8", "surrogatepass")
        return b"\n".join(lines)
    return data


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return every ``(container, key)`` of a document."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return found


def _value_of(data: bytes, line: int, at: int, value: Any) -> bytes:
    def change(document: Any) -> Any:
        places = _places(document)
        if not places:
            return value
        container, key = places[at % len(places)]
        container[key] = value
        return document

    return _in_document(data, line, change)


def _key_of(data: bytes, line: int, at: int, how: str) -> bytes:
    def change(document: Any) -> Any:
        places = [place for place in _places(document) if isinstance(place[0], dict)]
        if places:
            container, key = places[at % len(places)]
            value = container[key]
            if how != "add":
                del container[key]
            if how != "drop":
                container[f"{key}_"] = value
        return document

    return _in_document(data, line, change)


_KINDS = {"splice": _splice, "cut": _cut, "line": _line, "value": _value_of, "key": _key_of}
