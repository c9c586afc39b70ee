"""Look at foreign modules and functions without touching them: no ``getattr`` on modules, raw descriptors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

_DEPTH = 8
"""How many layers of wrapping are followed."""


def namespace_of(module: object) -> dict[str, Any] | None:
    """Return the dictionary of a module without triggering a lazy one; None if it is no module.

    ``object.__getattribute__`` because `importlib.util.LazyLoader` loads on any attribute access.
    """
    if not issubclass(type(module), ModuleType):
        return None
    namespace = object.__getattribute__(module, "__dict__")
    return namespace if isinstance(namespace, dict) else None


def raw_attribute(parent: object, name: str) -> tuple[Any, bool]:
    """Return what stands in the dictionary for ``parent.name``, and whether a class inherits it.

    Raises:
        KeyError: there is nothing by that name.
    """
    if isinstance(parent, type):
        for owner in parent.__mro__:
            if name in vars(owner):
                return vars(owner)[name], owner is not parent
        raise KeyError(name)
    namespace = namespace_of(parent)
    if namespace is None:
        raise KeyError(name)
    if name not in namespace and _stands_for_another(parent):
        try:
            return getattr(parent, name), True
        except (AttributeError, ImportError):
            raise KeyError(name) from None
    return namespace[name], False


def _stands_for_another(module: object) -> bool:
    """Tell whether a module passes attributes on to another one, as ``torch`` does under MSAdapter."""
    return any("__getattr__" in vars(kind) for kind in type(module).__mro__ if kind is not ModuleType)


def set_attribute(parent: Any, name: str, value: Any) -> None:
    """Set ``parent.name`` of a class or a module; a module's own ``__setattr__`` is not asked."""
    namespace = namespace_of(parent)
    if namespace is None:
        setattr(parent, name, value)
    else:
        namespace[name] = value


def module_bindings(wanted: Collection[int]) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield module name, dictionary, attribute, value of what ``sys.modules`` binds whose ``id`` is wanted.

    Identity, because foreign objects may answer ``==`` in ways of their own (arrays do).
    """
    wanted = frozenset(wanted)
    for module_name, module in list(sys.modules.items()):
        namespace = namespace_of(module)
        if namespace is None or wanted.isdisjoint(map(id, list(namespace.values()))):
            continue
        for attribute, value in list(namespace.items()):
            if id(value) in wanted:
                yield module_name, namespace, attribute, value


def layers(top: Any) -> Iterator[Any]:
    """Yield ``top`` and what it visibly wraps, nearest first.

    Follows ``__wrapped__``, descriptors, partials, closures and the attributes of callable objects. A wrapper
    that hides what it calls any better cannot be seen; then the call counter is the judge.
    """
    level, seen = [top], {id(top)}
    for _ in range(_DEPTH):
        yield from level
        inner = [value for layer in level for value in _inner(layer) if _is_layer(value)]
        level = list({id(value): value for value in inner if id(value) not in seen}.values())
        seen.update(map(id, level))


def reaches(top: Any, wanted: object) -> bool:
    """Tell whether ``wanted`` is visibly wrapped by ``top``."""
    return any(layer is wanted for layer in layers(top))


def describe(value: object) -> str:
    """Name a function for a message, without calling anything of it."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if name else type(value).__name__


def _is_layer(value: object) -> bool:
    if isinstance(value, (type, ModuleType)):
        return False
    return callable(value) or isinstance(value, (staticmethod, classmethod))


def _inner(layer: Any) -> Iterator[Any]:
    if isinstance(layer, (staticmethod, classmethod)):
        yield layer.__func__
        return
    # _self_parent: what getattr(cls, name) gives of a wrapt wrapper is bound, and only that leads back to it.
    for link in ("__wrapped__", "_self_parent"):
        inner = getattr(layer, link, None)
        if inner is not None:
            yield inner
    if isinstance(layer, functools.partial):
        yield layer.func
    yield from map(_content, getattr(layer, "__closure__", None) or ())
    if not inspect.isroutine(layer):
        yield from getattr(layer, "__dict__", {}).values()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
