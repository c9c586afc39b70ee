"""The shape of what ``run.json`` says of configuration and settings, checked once for all that read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_precision.errors import DumpError

_LARGEST = 1 << 1000
"""Integers beyond it are no numbers of a training, and are too large for a float."""

_SECTIONS = (
    *("megatron_args", "transformer_config", "ddp_config", "optimizer_config"),
    *("model_config", "schedule"),
)
_SETTINGS = ("capture", "determinism")
_WHOLE = ("config", "settings")


def check_manifest(manifest: Mapping[str, Any], *, where: str) -> None:
    """Refuse sections that are no mappings, and integers that no float holds; absent sections are none.

    Raises:
        DumpError: the manifest is damaged.
    """
    for name in _WHOLE:
        _require(manifest.get(name), dict, f"{where}: {name}")
    for name in _SECTIONS:
        _require((manifest.get("config") or {}).get(name), dict, f"{where}: config.{name}")
    settings = manifest.get("settings") or {}
    for name in _SETTINGS:
        _require(settings.get(name), dict, f"{where}: settings.{name}")
    rules = (settings.get("capture") or {}).get("rules")
    _require(rules, list, f"{where}: settings.capture.rules")
    for rule in rules or ():
        _require({} if rule == {} else rule or [], dict, f"{where}: settings.capture.rules")
    _integers(manifest, where)


def without_empty_sections(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked manifest without the sections that are null: they are absent, for all that read it."""
    kept = {name: value for name, value in manifest.items() if name not in _WHOLE or value is not None}
    for name, sections in (("config", _SECTIONS), ("settings", _SETTINGS)):
        if name in kept:
            inner = kept[name].items()
            kept[name] = {key: value for key, value in inner if key not in sections or value is not None}
    capture = kept.get("settings", {}).get("capture", {})
    if "rules" in capture and capture["rules"] is None:
        kept["settings"]["capture"] = {key: value for key, value in capture.items() if key != "rules"}
    return kept


def _require(value: Any, kind: type, where: str) -> None:
    if value is not None and not isinstance(value, kind):
        expected = "an object" if kind is dict else "a list"
        raise DumpError("ill-typed", where=where, found=repr(value)[:80], expected=expected)


def _integers(value: Any, where: str) -> None:
    if type(value) is int and abs(value) > _LARGEST:
        raise DumpError("not a number", where=where, found=f"an integer of {value.bit_length()} bits")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        _integers(one, where)
