"""Install a set of patches, all or none; undo them from the record of what was done; audit them in between.

This module is the only place in the product that sets foreign attributes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import Any, Literal

import wrapt

from mindspeed_precision.errors import PatchError
from mindspeed_precision.patching.audit import Installation, PatchAudit, Status, left_out, standing
from mindspeed_precision.patching.declare import Called, Effect, PatchDeclaration
from mindspeed_precision.patching.lookup import (
    describe,
    layers,
    module_bindings,
    raw_attribute,
    set_attribute,
)
from mindspeed_precision.patching.resolve import Resolution, Wrapper, resolve

__all__ = ["PatchAudit", "PatchSession", "Status"]

_LOG = logging.getLogger(__name__)

Contain = Callable[[str, Wrapper, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""``(where, wrapper, wrapped, instance, args, kwargs)``: ``capture.containment.Containment.call``."""

_CHECK = "`mindspeed-precision patches check` shows what each patch finds on this machine"
_ORDER = "apply every other patch before the debugged run begins; patches/README.md says more"


class PatchSession:
    """The patches of one run.

    Example::

        with PatchSession(select(load_declarations(), groups=["wgrad"])) as session:
            train(...)
            session.require_healthy(at="first step")
    """

    def __init__(
        self,
        declarations: Iterable[PatchDeclaration],
        *,
        allow_external: bool = False,
        contain: Contain | None = None,
    ) -> None:
        """Prepare; nothing is imported or changed before `install`.

        Args:
            declarations: what to patch. On one target ``constrain`` goes below ``observe``: an observer sees
                what the constrained code really computed.
            allow_external: load wrappers outside this package.
            contain: calls an observing wrapper so that what it raises does not reach its caller; None: all of
                it does, as what a ``constrain`` raises always does.
        """
        ordered = sorted(declarations, key=lambda declaration: declaration.effect is not Effect.CONSTRAIN)
        self.declarations: tuple[PatchDeclaration, ...] = tuple(ordered)
        self.allow_external = allow_external
        self._contain = contain
        self._installations: list[Installation] = []
        self._left_out: list[PatchAudit] = []
        self._installed = False

    def __enter__(self) -> PatchSession:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def install(self) -> None:
        """Resolve all, check all, then install all.

        Raises:
            PatchError: the session is installed already, or anything stands in the way; then nothing was
                changed, and every problem is named.
        """
        if self._installed:
            raise PatchError("this patch session is installed already", remedy="undo it first")
        resolutions = [resolve(d, allow_external=self.allow_external) for d in self.declarations]
        problems = [(r.declaration, r.reason) for r in resolutions if r.refused]
        problems += [(r.declaration, "is patched by another session") for r in resolutions if _is_patched(r)]
        if problems:
            raise _error("no patch was applied", problems, _CHECK)
        self._left_out = [left_out(r.declaration, r.reason) for r in resolutions if r.not_applicable]
        self._installations = []
        self._installed = True
        try:
            for resolution in self._distinct([r for r in resolutions if not r.not_applicable]):
                self._install_one(resolution)
            self._sweep_in()
        except Exception as error:
            failed = self._installations[-1].declaration if self._installations else self.declarations[0]
            self.undo()
            raise _error("no patch was applied", [(failed, f"could not be set: {error}")], _CHECK) from error

    def undo(self) -> tuple[str, ...]:
        """Put back every raw descriptor and every alias; do nothing when nothing is installed.

        What somebody else set over ours stays: ours below it becomes a pass-through.

        Returns:
            One sentence for every place that could not be restored; they are logged as warnings, too.
        """
        if not self._installed:
            return ()
        self._installed = False
        for installation in reversed(self._installations):
            installation.active = False
            _restore(installation)
        originals = {id(i.wrapper): self._original(i) for i in self._installations if i.wrapper is not None}
        for _, namespace, attribute, value in module_bindings(originals):
            namespace[attribute] = originals[id(value)]
        notes = tuple(f"{i.declaration.name}: {i.note}" for i in self._installations if i.note)
        for note in notes:
            _LOG.warning("patch left in place: %s", note)
        return notes

    def silence(self, *, but: Collection[str] = ()) -> None:
        """Make every observer a pass-through, except those of the groups ``but``; what constrains goes on."""
        for installation in self._installations:
            declaration = installation.declaration
            if declaration.effect is Effect.OBSERVE and declaration.group not in but:
                installation.active = False

    def audit(self) -> list[PatchAudit]:
        """Tell where every patch stands now, in the order of the declarations."""
        lines = {line.name: line for line in (*self._left_out, *map(self._audit_one, self._installations))}
        return [lines[d.name] for d in self.declarations if d.name in lines]

    def require_healthy(self, at: Literal["start", "first step"], *, excused: Collection[str] = ()) -> None:
        """Refuse to go on with a patch that sees nothing.

        Args:
            at: ``start`` when the training loop begins, ``first step`` when its first step has ended.
            excused: names of patches that this model cannot call (a pipeline stage without parallel linears);
                a displaced one is still an error.

        Raises:
            PatchError: names every patch that is displaced, or was not called though it was due.
        """
        due = {Called.START} if at == "start" else {Called.START, Called.STEP}
        called = {i.declaration.any_of or i.declaration.name for i in self._installations if i.calls}
        problems = []
        for line, installation in ((self._audit_one(i), i) for i in self._installations):
            declaration = installation.declaration
            if line.problem:
                problems.append((declaration, line.problem))
            elif declaration.name in excused:
                continue
            elif declaration.called in due and (declaration.any_of or declaration.name) not in called:
                problems.append((declaration, f"was never called by the {at} ({line.status.value})"))
        for installation in self._installations:
            installation.calls_at_check = installation.calls
        if problems:
            raise _error(f"patches see nothing at the {at}", problems, _ORDER)

    def _distinct(self, resolutions: list[Resolution]) -> list[Resolution]:
        """Leave out a target that is another one's alias under the same wrapper: one call must count once."""
        first: dict[tuple[int, int, tuple[Any, ...]], Resolution] = {}
        for resolution in resolutions:
            place = (
                (id(resolution.parent), resolution.attribute) if isinstance(resolution.parent, type) else ()
            )
            key = (id(resolution.raw), id(resolution.wrapper), place)
            other = first.setdefault(key, resolution)
            if other is not resolution:
                reason = f"the same function as {other.declaration.target}"
                self._left_out.append(left_out(resolution.declaration, reason))
        return list(first.values())

    def _install_one(self, resolution: Resolution) -> None:
        parent, attribute = resolution.parent, resolution.attribute
        for other in self._installations:  # an alias of a function that is patched already joins its stack
            if not isinstance(parent, type) and self._original(other) is resolution.raw:
                parent, attribute = other.parent, other.attribute
        before, inherited = raw_attribute(parent, attribute)
        installation = Installation(
            declaration=resolution.declaration,
            parent=parent,
            attribute=attribute,
            before=before,
            inherited=inherited,
        )
        self._installations.append(installation)
        assert resolution.wrapper is not None
        below = staticmethod(before) if _lost_its_staticmethod(resolution, before) else before
        wrapper: Any = wrapt.FunctionWrapper(below, _counted(installation, resolution.wrapper, self._contain))
        wrapper._self_patch = resolution.declaration.name
        set_attribute(parent, attribute, wrapper)
        installation.wrapper = wrapper

    def _original(self, installation: Installation) -> Any:
        """Return what stood at the place of ``installation`` before the first patch of this session."""
        stack = (i for i in self._installations if i.parent is installation.parent)
        return next(i.before for i in stack if i.attribute == installation.attribute)

    def _sweep_in(self) -> None:
        """Replace what other modules bound by ``from x import f`` before us."""
        tops = {id(self._original(i)): i for i in self._installations if not isinstance(i.parent, type)}
        for module, namespace, attribute, value in module_bindings(tops):
            installation = tops[id(value)]
            namespace[attribute] = installation.wrapper
            installation.aliases.append((module, namespace, attribute))

    def _audit_one(self, installation: Installation) -> PatchAudit:
        status, problem = Status.UNDONE, ""
        if self._installed:
            status, problem = standing(installation, {id(i.wrapper) for i in self._installations})
        return PatchAudit(
            name=installation.declaration.name,
            target=installation.declaration.target,
            effect=installation.declaration.effect,
            status=status,
            calls=installation.calls,
            problem=problem,
            note=installation.note,
        )


def _counted(installation: Installation, wrapper: Wrapper, contain: Contain | None) -> Wrapper:
    contained = contain is not None and installation.declaration.effect is Effect.OBSERVE
    where = f"the patch {installation.declaration.name}"

    def call(
        wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not installation.active:
            return wrapped(*args, **kwargs)
        installation.calls += 1
        if contain is not None and contained:
            return contain(where, wrapper, wrapped, instance, args, kwargs)
        return wrapper(wrapped, instance, args, kwargs)

    return call


def _lost_its_staticmethod(resolution: Resolution, before: Any) -> bool:
    """Tell whether somebody read a static method by ``getattr`` and set the plain function (MindSpeed does).

    wrapt would take its first argument for the instance.
    """
    if not isinstance(resolution.parent, type) or isinstance(before, (staticmethod, classmethod)):
        return False
    first = resolution.declaration.signatures[0].strip("( )").partition(",")[0].strip()
    return first not in ("self", "cls")


def _restore(installation: Installation) -> None:
    if installation.wrapper is None:
        return
    current = installation.current()
    if current is not installation.wrapper:
        installation.note = f"{describe(current)} was set over {installation.declaration.target} and stays"
    elif installation.inherited:
        delattr(installation.parent, installation.attribute)
    else:
        set_attribute(installation.parent, installation.attribute, installation.before)


def _is_patched(resolution: Resolution) -> bool:
    name = resolution.declaration.name
    return any(getattr(layer, "_self_patch", None) == name for layer in layers(resolution.raw))


def _error(what: str, problems: list[tuple[PatchDeclaration, str]], remedy: str) -> PatchError:
    lines = [f"  {declaration.name} ({declaration.target}): {reason}" for declaration, reason in problems]
    return PatchError("\n".join([f"{what}:", *lines]), remedy=remedy)
