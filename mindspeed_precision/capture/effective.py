"""What this rank's live objects hold before the first step: the optimizer's groups, and numbers of modules.

What was asked for is in the configuration; what was built is here. Read from attributes alone: no tensor is
touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.capture.configuration import plain
from mindspeed_precision.capture.names import Names
from mindspeed_precision.capture.optimizer_members import inner_names, members, own_ranges

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SCALARS = (bool, float, str)


def effective_state(backend: CaptureBackend, names: Names, optimizer: Any) -> dict[str, Any]:
    """Return the content of a rank's ``effective.json`` (``docs/dump-format.md``), without its schema."""
    return {
        "groups": _groups(backend, names, optimizer),
        "tied": dict(names.aliases),
        "modules": _modules(backend, names),
    }


def _groups(backend: CaptureBackend, names: Names, optimizer: Any) -> list[dict[str, Any]]:
    """Return every parameter group of every optimizer of the framework inside ``optimizer``."""
    known = inner_names(backend, names.parameters, optimizer)
    ranges = own_ranges(names.parameters, optimizer)
    used = {id(parameter) for _, parameter in names.parameters}
    found = []
    for member in members(optimizer):
        if not backend.is_optimizer(member):
            continue
        for settings, tensors in backend.parameter_groups(member):
            found.append(
                {
                    "optimizer": f"{type(member).__module__}.{type(member).__qualname__}",
                    "settings": _scalars(settings),
                    "parameters": [
                        {
                            "fqn": known.get(id(tensor), ""),
                            "dtype": backend.dtype(tensor),
                            "copy": id(tensor) not in used,
                            "range": list(ranges.get(known.get(id(tensor), ""), ())) or None,
                        }
                        for tensor in tensors
                    ],
                }
            )
    return found


def _scalars(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, (tuple, list)) and name == "betas":
            kept |= {"beta1": plain(value[0]), "beta2": plain(value[1])}
        elif value is None or isinstance(value, (int, *_SCALARS)):
            kept[str(name)] = plain(value)
    return kept


def _modules(backend: CaptureBackend, names: Names) -> list[dict[str, Any]]:
    """Return what each module is, and switches and numbers that it keeps; what is alike over layers once."""
    found: dict[str, dict[str, Any]] = {}
    for fqn, module in names.modules:
        values: dict[str, Any] = {}
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training":
                continue
            if type(value) in (bool, float):
                values[name] = plain(value)
            elif backend.is_tensor(value):  # a table of its own: frequencies of a rotary embedding
                values[name] = backend.dtype(value)
        line = {
            "fqn": _NUMBER.sub("*", fqn),
            "class": f"{type(module).__module__}.{type(module).__qualname__}",
            "values": values,
        }
        found.setdefault(repr(line), line)
    return list(found.values())
