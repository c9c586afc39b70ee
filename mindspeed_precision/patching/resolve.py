"""From a declaration to the place that it names, checked: it exists, its signature and version are known."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from packaging.version import InvalidVersion, Version

from mindspeed_precision.patching.declare import PatchDeclaration, parse_requirement
from mindspeed_precision.patching.lookup import namespace_of, raw_attribute
from mindspeed_precision.patching.signatures import parameters_found, parameters_of

_OWN_PACKAGE = "mindspeed_precision"
OPAQUE = [1, 2]
"""Stars of the parameters of ``(*args, **kwargs)``, whatever their names are."""

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


class Outcome(str, Enum):
    """What came of resolving a declaration on this machine."""

    OK = "ok"
    ABSENT = "absent"
    EXCLUDED = "version excluded"
    SIGNATURE = "signature differs"
    WRAPPER = "wrapper unusable"
    ELSEWHERE = "not in the trees"
    """Of given source trees: none holds the package."""


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A declaration with what it found.

    Attributes:
        outcome: ok, or what stands in the way.
        reason: one sentence, empty when ok.
        parent: module or class that holds the target; None unless ok.
        attribute: the name in ``parent``.
        raw: the raw descriptor found there.
        wrapper: the loaded wrapper.
    """

    declaration: PatchDeclaration
    outcome: Outcome
    reason: str = ""
    parent: Any = None
    attribute: str = ""
    raw: Any = None
    wrapper: Wrapper | None = None

    @property
    def not_applicable(self) -> bool:
        """Whether the declaration itself allows that the patch is left out here."""
        absent = self.outcome is Outcome.ABSENT and (self.declaration.optional or self.declaration.if_loaded)
        return absent or self.outcome is Outcome.EXCLUDED

    @property
    def refused(self) -> bool:
        """Whether this is an error."""
        return self.outcome is not Outcome.OK and not self.not_applicable


class _UnresolvedError(Exception):
    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


def resolve(declaration: PatchDeclaration, *, allow_external: bool = False) -> Resolution:
    """Find the target and the wrapper of ``declaration`` and check them; nothing is changed."""
    try:
        if declaration.if_loaded and declaration.module not in sys.modules:
            raise _UnresolvedError(Outcome.ABSENT, f"{declaration.module} is not imported by this program")
        for requirement in declaration.requires:
            _check_version(requirement)
        parent, attribute, raw = _find(declaration)
        _check_signature(declaration, raw)
        wrapper = _load_wrapper(declaration, allow_external=allow_external)
    except _UnresolvedError as error:
        return Resolution(declaration=declaration, outcome=error.outcome, reason=error.reason)
    return Resolution(
        declaration=declaration,
        outcome=Outcome.OK,
        parent=parent,
        attribute=attribute,
        raw=raw,
        wrapper=wrapper,
    )


def _import(module: str, outcome: Outcome) -> dict[str, Any]:
    try:
        namespace = namespace_of(importlib.import_module(module))
    except Exception as error:  # whatever a foreign module raises while it is imported
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        reason = str(error) if missing else f"importing {module} failed: {type(error).__name__}: {error}"
        raise _UnresolvedError(outcome, reason) from error
    if namespace is None:
        raise _UnresolvedError(outcome, f"{module} is no module")
    return namespace


def _check_version(text: str) -> None:
    requirement = parse_requirement(text)
    namespace = _import(requirement.name, Outcome.ABSENT)
    found = str(namespace.get("__version__", ""))
    try:
        version = Version(Version(found).public)
    except InvalidVersion as error:
        raise _UnresolvedError(Outcome.EXCLUDED, f"{requirement.name} has no version ({found!r})") from error
    if not requirement.specifier.contains(version, prereleases=True):
        raise _UnresolvedError(Outcome.EXCLUDED, f"needs {text}, found {found}")


def _find(declaration: PatchDeclaration) -> tuple[Any, str, Any]:
    _import(declaration.module, Outcome.ABSENT)
    parent: Any = sys.modules[declaration.module]
    *owners, attribute = declaration.qualname.split(".")
    place = declaration.module
    for owner in owners:
        try:
            inner, _ = raw_attribute(parent, owner)
        except KeyError:
            raise _UnresolvedError(Outcome.ABSENT, f"{place} has no {owner}") from None
        if not isinstance(inner, type):
            raise _UnresolvedError(Outcome.ABSENT, f"{place}.{owner} is no class")
        parent, place = inner, f"{place}.{owner}"
    try:
        return parent, attribute, raw_attribute(parent, attribute)[0]
    except KeyError:
        raise _UnresolvedError(Outcome.ABSENT, f"{place} has no {attribute}") from None


def _check_signature(declaration: PatchDeclaration, raw: Any) -> None:
    try:
        found = parameters_found(raw)
    except (TypeError, ValueError) as error:
        if declaration.opaque and callable(raw):  # an extension module's function shows none
            return
        raise _UnresolvedError(
            Outcome.SIGNATURE, f"{declaration.target} has no signature: {error}"
        ) from error
    if found in {parameters_of(signature) for signature in declaration.signatures}:
        return
    if declaration.opaque and [name.count("*") for name in found] == OPAQUE:
        return
    declared = " or ".join(declaration.signatures)
    raise _UnresolvedError(Outcome.SIGNATURE, f"declared for {declared}, found ({', '.join(found)})")


def _load_wrapper(declaration: PatchDeclaration, *, allow_external: bool) -> Wrapper:
    module, _, name = declaration.wrapper.partition(":")
    if module.partition(".")[0] != _OWN_PACKAGE and not allow_external:
        raise _UnresolvedError(
            Outcome.WRAPPER,
            f"wrapper {declaration.wrapper} is outside {_OWN_PACKAGE}; patches.allow_external=true loads it",
        )
    value = _import(module, Outcome.WRAPPER).get(name)
    if not callable(value):
        raise _UnresolvedError(Outcome.WRAPPER, f"{module} has no function {name}")
    home = str(getattr(value, "__module__", ""))
    if home.partition(".")[0] != _OWN_PACKAGE and not allow_external:  # what a module of ours imports
        raise _UnresolvedError(Outcome.WRAPPER, f"{module} has {name} from {home}, outside {_OWN_PACKAGE}")
    wrapper: Wrapper = value
    return wrapper
