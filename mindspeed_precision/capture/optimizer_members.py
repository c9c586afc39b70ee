"""What a chain of optimizers holds: which parameter each of its tensors belongs to, and which range of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_precision.backends.capture_base import CaptureBackend

Named = Sequence[tuple[str, Any]]
"""``(canonical fqn, parameter)`` of every parameter of this rank."""


def members(optimizer: Any) -> list[Any]:
    """Return ``optimizer`` and every optimizer inside it once, outermost first; nothing for None."""
    found: dict[int, Any] = {}
    waiting = [optimizer]
    while waiting:
        member = waiting.pop(0)
        if member is None or id(member) in found:
            continue
        found[id(member)] = member
        if hasattr(member, "chained_optimizers"):  # whose own `.optimizer` is refused when there are several
            waiting += member.chained_optimizers
            continue
        inner = getattr(member, "optimizer", None)
        waiting += [inner] if hasattr(inner, "param_groups") else []
    return list(found.values())


def sharded(optimizer: Any) -> bool:
    """Tell whether an optimizer is distributed: each rank has a range of each parameter, or none."""
    return any(hasattr(member, "model_param_gbuf_map") for member in members(optimizer))


def own_range(optimizer: Any, parameter: Any) -> tuple[int, int] | None:
    """Return the range of what this rank holds of ``parameter`` that a distributed optimizer updates here."""
    for member in members(optimizer):
        if parameter in getattr(member, "model_param_gbuf_map", ()):
            try:
                span = member._get_model_param_range_map(parameter)["param"]
            except KeyError:  # the bucket has the parameter, another rank owns it
                return None
            return int(span.start), int(span.end)
    return None


def own_ranges(parameters: Named, optimizer: Any) -> dict[str, tuple[int, int]]:
    """Return by name the ranges of this rank; empty unless the optimizer is distributed."""
    if not sharded(optimizer):
        return {}
    found = {fqn: own_range(optimizer, parameter) for fqn, parameter in parameters}
    return {fqn: span for fqn, span in found.items() if span is not None}


def inner_names(backend: CaptureBackend, parameters: Named, optimizer: Any) -> dict[int, str]:
    """Map ``id`` of what the inner optimizers update (parameters, copies, shards) to the parameter's fqn."""
    names = {id(parameter): fqn for fqn, parameter in parameters}
    for fqn, parameter in parameters:
        copy = getattr(parameter, "main_param", None)
        if backend.is_tensor(copy):
            names[id(copy)] = fqn
    known = dict(names)
    for member in members(optimizer):
        for models, copies in (
            ("float16_groups", "fp32_from_float16_groups"),
            ("model_float16_groups", "shard_fp32_from_float16_groups"),
            ("model_fp32_groups", "shard_fp32_groups"),
        ):
            for group, shadow in zip(getattr(member, models, ()), getattr(member, copies, ()), strict=False):
                for parameter, copy in zip(group, shadow, strict=False):
                    if id(parameter) in known and copy is not None:
                        names[id(copy)] = known[id(parameter)]
    return names
