"""Canonical names: a tensor is called the same on every rank, in every layout, under every wrapper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.errors import PrecisionError

_LAYER = re.compile(r"(?:.*\.)?layers\.\d+")
_EXPERT = re.compile(r"(?:.*\.)?local_experts\.\d+")
_GROUPED = re.compile(r"(?:.*\.)?experts\.linear_fc[12]")
_NUMBERED = re.compile(r"(weight|bias)(\d+)")


@dataclass(frozen=True, kw_only=True)
class Names:
    """Canonical names of everything in one rank's model chunks.

    Attributes:
        roots: the unwrapped model chunks, in order.
        modules: ``(canonical fqn, module)`` of every module of every chunk, the chunk itself as ``""``.
        parameters: ``(canonical fqn, parameter)``, each parameter object once, in model order.
        aliases: further fqns of parameters that are used under several names: ``{alias: first name}``.
        chunks: for each root its index.
    """

    roots: tuple[Any, ...]
    modules: tuple[tuple[str, Any], ...]
    parameters: tuple[tuple[str, Any], ...]
    aliases: dict[str, str]


def unwrap(backend: CaptureBackend, module: Any) -> Any:
    """Return the model inside DDP, Float16Module and other wrappers that hold it as ``.module``."""
    while backend.is_module(getattr(module, "module", None)):
        module = module.module
    return module


def canonical_names(backend: CaptureBackend, chunks: Sequence[Any]) -> Names:
    """Name the modules and parameters of ``chunks`` (the list that Megatron calls ``model``).

    Local numbers become global ones: a transformer layer's from its ``layer_number`` (1-based over the whole
    model, pipeline offset included), an expert's from its MoE layer's ``local_expert_indices``, also where
    one linear has the weights of all experts of a rank (``weight0``, ``weight1``: Transformer Engine's).

    Raises:
        PrecisionError: two parameters would have one name.
    """
    roots = tuple(unwrap(backend, chunk) for chunk in chunks)
    modules: list[tuple[str, Any]] = []
    parameters: dict[int, tuple[str, Any]] = {}
    aliases: dict[str, str] = {}
    for root in roots:
        for fqn, module, owner in _named_modules(backend, root):
            modules.append((fqn, module))
            for local, parameter in backend.own_parameters(module):
                name = _numbered(local, owner) if _GROUPED.fullmatch(fqn) else local
                full = f"{fqn}.{name}" if fqn else name
                first = parameters.setdefault(id(parameter), (full, parameter))[0]
                if first != full:
                    aliases[full] = first
    _require_unique(name for name, _ in parameters.values())
    return Names(roots=roots, modules=tuple(modules), parameters=tuple(parameters.values()), aliases=aliases)


def _require_unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PrecisionError(
                "two parameters have one name, so their records could not be told apart",
                where=name,
                expected="the chunks of one model",
                remedy="use one Session for each model",
            )
        seen.add(name)


def _numbered(name: str, moe_layer: Any) -> str:
    """Return the name of a grouped linear's parameter with the expert's number in the whole model."""
    found = _NUMBERED.fullmatch(name)
    if found is None or moe_layer is None:
        return name
    return f"{found.group(1)}{int(moe_layer.local_expert_indices[int(found.group(2))])}"


def _named_modules(backend: CaptureBackend, root: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(canonical fqn, module, its MoE layer)``; one that is registered twice keeps its first name."""
    seen: set[int] = set()

    def walk(module: Any, local: str, canonical: str, owner: Any) -> Iterator[Any]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield canonical, module, owner
        for name, child in backend.children(module):
            child_local = f"{local}.{name}" if local else name
            number = _global_number(child_local, child, owner) if name.isdigit() else None
            child_name = name if number is None else str(number)
            child_canonical = f"{canonical}.{child_name}" if canonical else child_name
            # a container (experts, layers) passes its own owner on: the MoE layer owns its experts
            yield from walk(child, child_local, child_canonical, _owner(module, owner))

    yield from walk(root, "", "", None)


def _owner(module: Any, inherited: Any) -> Any:
    return module if hasattr(module, "local_expert_indices") else inherited


def _global_number(local: str, module: Any, moe_layer: Any) -> int | None:
    if _LAYER.fullmatch(local):
        number = getattr(module, "layer_number", None)
        return number - 1 if isinstance(number, int) else None
    if _EXPERT.fullmatch(local) and moe_layer is not None:
        return int(moe_layer.local_expert_indices[int(local.rpartition(".")[2])])
    return None
