"""What a configuration of msprobe selects: modules by name, directions, inputs or outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_precision.errors import ConfigError, DumpError
from mindspeed_precision.msprobe.names import MODULE_KINDS, parse_name
from mindspeed_precision.msprobe.translation import Translation

_FORWARD_DROPS = ("dgrad", "wgrad", "accumulate")


def _scope(made: Translation, value: Any, name: str, where: str) -> None:
    if value:
        made.without[name] = "no range of execution: everything is recorded, or what `list` names"
    else:
        made.became[name] = "nothing: everything is recorded"


def _list(made: Translation, value: Any, name: str, where: str) -> None:
    patterns, odd = _patterns(value, f"{where}: {name}")
    if not value:
        made.became[name] = "nothing: everything is recorded"
    elif patterns:
        level = made.capture()["level"]
        made.capture()["level"] = "fingerprint"
        for pattern in patterns:
            made.rule(fqn=pattern, level=level)
        made.became[name] = (
            f"capture.rules: level {level} for {', '.join(patterns)}; of all else the fingerprint, so that a "
            "comparison can tell where a difference begins"
        )
    if odd:
        made.without[f"{name}: {', '.join(odd)}"] = "no module: operations are not recorded"


def _tensor_list(made: Translation, value: Any, name: str, where: str) -> None:
    patterns, odd = _patterns(value, f"{where}: {name}")
    for pattern in patterns:
        made.rule(fqn=pattern, level="tensor")
    if patterns or not value:
        made.became[name] = f"capture.rules: level tensor for {', '.join(patterns) or 'nothing'}"
    if odd:
        made.without[f"{name}: {', '.join(odd)}"] = "no module: operations are not recorded"


def _patterns(value: Any, where: str) -> tuple[list[str], list[str]]:
    """Return patterns on our names for the modules of a list, and what in it is no module."""
    if not isinstance(value, list | None) or not all(isinstance(one, str) for one in value or ()):
        raise ConfigError("not a list of names", where=where, found=repr(value)[:60], expected="a list")
    patterns, odd = [], []
    for name in value or ():
        kind, dot, rest = name.partition(".")
        try:
            parsed = parse_name(name) if kind in MODULE_KINDS else None
        except DumpError:
            parsed = None
        if parsed is not None:
            patterns.append(parsed.path or "")
        elif kind in MODULE_KINDS and dot and rest:
            patterns.append(f"{'.'.join(part for part in rest.split('.') if part != 'module')}*")
        else:
            odd.append(name)
    return list(dict.fromkeys(patterns)), odd


def _data_mode(made: Translation, value: Any, name: str, where: str) -> None:
    known = {"all", "forward", "backward", "input", "output"}
    modes = set(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else {None}
    if not modes <= known:
        expected = ", ".join(sorted(known))
        raise ConfigError(
            "no such data_mode", where=f"{where}: {name}", found=repr(value)[:60], expected=expected
        )
    rules: list[dict[str, str]] = []
    if not modes & {"all", "backward"} and "forward" in modes:
        rules += [{"phase": phase} for phase in _FORWARD_DROPS]
    if not modes & {"all", "forward"} and "backward" in modes:
        rules.append({"phase": "fprop"})
    if not modes & {"all", "output"} and "input" in modes:
        rules += [{"phase": "fprop", "role": "output"}, {"phase": "dgrad", "role": "grad_input"}]
    if not modes & {"all", "input"} and "output" in modes:
        rules += [{"phase": "fprop", "role": "input"}, {"phase": "dgrad", "role": "grad_output"}]
    for rule in rules:
        made.rule(**rule, level="drop")
    dropped = "; ".join(" ".join(rule.values()) for rule in rules)
    made.became[name] = f"capture.rules: drop {dropped}" if rules else "nothing: everything is recorded"


OF_TASK: Mapping[str, Callable[[Translation, Any, str, str], None]] = {
    "scope": _scope,
    "list": _list,
    "tensor_list": _tensor_list,
    "data_mode": _data_mode,
}
"""Keys of a task."""
