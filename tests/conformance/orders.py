"""Run every declaration through orders of import, apply, undo and a foreign re-apply; print what went wrong.

A process of its own for each version of Megatron, started by test_patches.py. Nothing here knows a patch: its
target, parameters and kind come from the declaration. Foreign re-apply is a miniature of MindSpeed's
``mindspeed/patch_utils.py``.
"""

from __future__ import annotations

import functools
import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace

from mindspeed_precision.errors import PatchError
from mindspeed_precision.patching import audit as audit_module
from mindspeed_precision.patching import session as session_module
from mindspeed_precision.patching.declare import load_declarations, parse_requirement
from mindspeed_precision.patching.lookup import module_bindings, namespace_of, raw_attribute, set_attribute
from mindspeed_precision.patching.resolve import resolve
from mindspeed_precision.patching.session import PatchSession, Status
from mindspeed_precision.patching.signatures import parameters_found, parameters_of

MARK = "conformance report: "  # Megatron prints, too
ADAPTS = {"parse_args": {"extra_args_provider"}}  # the arguments that a wrapper is there to change


class MiniatureOfMindSpeedsPatch:
    """Reads its original by getattr, once; rebuilds from it at every apply; sweeps modules by identity."""

    def __init__(self, place):
        self.place = place
        self.original = None
        self.wrappers = []

    def register(self, wrapper):
        self.wrappers.append(wrapper)

    def apply(self):
        current = getattr(self.place.parent, self.place.attribute)
        if self.original is None:
            self.original = current
        final = self.original
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.place.parent, self.place.attribute, final)
        for _, namespace, name, _ in module_bindings({id(current)}):
            namespace[name] = final


def some_wrapper(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Place:
    """The target of one declaration, and a picture of everything that shows it."""

    def __init__(self, declaration):
        resolution = resolve(declaration)
        self.declaration = declaration
        self.parent, self.attribute, self.raw = resolution.parent, resolution.attribute, resolution.raw
        self.own = isinstance(self.parent, type) and self.attribute in vars(self.parent)
        self.aliases = self.bindings(self.raw)

    def bindings(self, wanted):
        return sorted((module, name) for module, _, name, _ in module_bindings({id(wanted)}))

    def now(self):
        return raw_attribute(self.parent, self.attribute)[0]

    def put(self, value):
        """Replace the target and its aliases, as if the program had been written so."""
        before = self.now()
        for _, namespace, name, _ in module_bindings({id(before)}):
            namespace[name] = value
        set_attribute(self.parent, self.attribute, value)

    def restore(self):
        """Put everything back, whatever an order has left."""
        self.put(self.raw)
        if isinstance(self.parent, type) and not self.own:
            delattr(self.parent, self.attribute)

    def untouched(self):
        problems = []
        if self.now() is not self.raw:
            problems.append("the raw descriptor is not back")
        if isinstance(self.parent, type) and (self.attribute in vars(self.parent)) != self.own:
            problems.append("an inherited attribute stayed behind")
        if self.bindings(self.raw) != self.aliases:
            problems.append(f"aliases {self.aliases} became {self.bindings(self.raw)}")
        return problems


def expect(condition, problem):
    return [] if condition else [problem]


def status(session):
    return session.audit()[0].status


def refuses(action, text):
    try:
        action()
    except PatchError as error:
        return expect(text in str(error), f"refused without naming {text}")
    return [f"not refused ({text})"]


def apply_undo(place):
    session = PatchSession([place.declaration])
    session.install()
    problems = expect(status(session) is Status.OUTERMOST, "not outermost after install")
    problems += expect(not place.bindings(place.raw), "an alias still shows the original")
    problems += expect(session.undo() == (), "undo left something")
    return problems + place.untouched()


def apply_apply_undo_undo(place):
    session = PatchSession([place.declaration])
    session.install()
    problems = refuses(session.install, "installed already")
    problems += refuses(PatchSession([place.declaration]).install, place.declaration.name)
    problems += expect(session.undo() == () == session.undo(), "undo left something")
    return problems + place.untouched()


def foreign_apply_undo(place):
    foreign = MiniatureOfMindSpeedsPatch(place)
    foreign.register(some_wrapper)
    foreign.apply()
    theirs = place.now()
    with PatchSession([place.declaration]) as session:
        problems = expect(status(session) is Status.OUTERMOST, "not outermost over a foreign patch")
    return problems + expect(place.now() is theirs, "the foreign patch is not back")


def foreign_apply_reapply(place):
    foreign = MiniatureOfMindSpeedsPatch(place)
    foreign.register(some_wrapper)
    foreign.apply()
    with PatchSession([place.declaration]) as session:
        foreign.register(some_wrapper)
        foreign.apply()
        theirs = place.now()
        problems = expect(status(session) is Status.DISPLACED, "evicted without a word")
        problems += refuses(functools.partial(session.require_healthy, at="start"), place.declaration.name)
    problems += expect(place.now() is theirs, "a stranger was buried")
    return problems + expect(session.audit()[0].note != "", "nobody says that a stranger stays")


def apply_foreign(place):
    with PatchSession([place.declaration]) as session:
        foreign = MiniatureOfMindSpeedsPatch(place)
        foreign.register(some_wrapper)
        foreign.apply()
        theirs = place.now()
        problems = expect(status(session) is Status.COVERED, "covered, but not said so")
    return problems + expect(place.now() is theirs, "a stranger was buried")


def call(place):
    """An idle wrapper is called once, and hands every argument and the result through."""
    signatures = place.declaration.signatures
    found = parameters_found(place.raw) if not place.declaration.opaque else None
    problems = []
    for signature in signatures:
        if found is None or parameters_of(signature) == found:
            problems += call_as(place, signature)
    return problems


def call_as(place, signature):
    names = [name for name in parameters_of(signature) if name not in ("*", "/")]
    keyword_only = parameters_of(signature).index("*") if "*" in parameters_of(signature) else len(names)
    namespace = {}
    exec(f"def fake{signature}: return [({', '.join(names)},)]", namespace)
    instance = SimpleNamespace()
    is_method = names[:1] == ["self"]
    fake = namespace["fake"]
    place.put(staticmethod(fake) if isinstance(place.parent, type) and not is_method else fake)
    sent = {name: object() for name in names}
    if is_method:
        sent["self"] = instance
    positional = [sent[name] for name in names[is_method:keyword_only]]
    with PatchSession([place.declaration]) as session:
        target = place.now()
        if isinstance(place.parent, type):
            target = target.__get__(instance if is_method else None, place.parent)
        ((*got,),) = target(*positional, **{name: sent[name] for name in names[keyword_only:]})
        calls = session.audit()[0].calls
    problems = expect(calls == 1, f"{calls} calls were counted instead of 1")
    changed = {name for name, value in zip(names, got, strict=True) if sent[name] is not value}
    return problems + expect(
        changed == ADAPTS.get(place.declaration.name, set()), f"{signature}: the wrapper changed {changed}"
    )


ORDERS = [
    apply_undo,
    apply_apply_undo_undo,
    foreign_apply_undo,
    foreign_apply_reapply,
    apply_foreign,
    call,
]


def run(declaration):
    """Return {order: problems} of one declaration."""
    place = Place(declaration)
    return {order.__name__: run_order(order, place) for order in ORDERS}


def run_order(order, place):
    try:
        return order(place)
    except Exception as error:  # noqa: BLE001  # whatever it is, the report must name it
        return [f"{type(error).__name__}: {error}"]
    finally:
        place.restore()


def apply_before_import(declarations):
    """Let the engine do every import, all declarations in one session."""
    imported = [d.name for d in declarations if d.module in sys.modules and d.module.startswith("megatron")]
    problems = expect(not imported, f"already imported: {imported}")
    with PatchSession(declarations) as session:
        for line in session.audit():
            if line.status not in (Status.OUTERMOST, Status.NOT_APPLICABLE):
                problems.append(f"{line.name} is {line.status.value}: {line.note}")
    namespaces = {name: namespace_of(module) or {} for name, module in list(sys.modules.items())}
    left = [
        f"{m}.{name}" for m, names in namespaces.items() for name, value in names.items() if is_ours(value)
    ]
    return problems + expect(not left, f"left behind: {left}")


def is_ours(value):
    return type(value).__name__ == "FunctionWrapper" and getattr(value, "_self_patch", "") != ""


def broken_engines(declarations):
    """Return what the orders say of an engine that forgets to undo, and of one that forgets the aliases."""
    reports = {}
    for fault, engine, name, replacement in (
        ("forgets to undo", session_module, "_restore", lambda installation: None),
        ("forgets aliases", session_module, "module_bindings", lambda wanted: iter(())),
        ("sees nobody else", audit_module, "reaches", lambda top, wanted: True),
    ):
        original = getattr(engine, name)
        setattr(engine, name, replacement)
        try:
            reports[fault] = [problem for d in declarations for found in run(d).values() for problem in found]
        finally:
            setattr(engine, name, original)
    return reports


def can_be_here(declaration):
    """Tell whether a target and what it requires are installed, without importing more than their roots."""
    required = [parse_requirement(text).name for text in declaration.requires]
    return all(is_installed(module) for module in (declaration.module, *required))


def is_installed(module):
    """Tell whether the package of a module is here."""
    root, *rest = module.split(".")
    return find_spec(root) is not None and (not rest or find_spec(f"{root}.{rest[0]}") is not None)


def main():
    from mindspeed_precision.testing import cpu

    cpu.install()
    declarations = load_declarations()
    here = [d for d in declarations if not d.if_loaded and can_be_here(d)]
    report = {"before_import": apply_before_import(here)}
    outcomes = {d.name: resolve(d) for d in declarations}
    report["outcomes"] = {name: [r.outcome.value, r.refused, r.reason] for name, r in outcomes.items()}
    report["orders"] = {d.name: run(d) for d in declarations if outcomes[d.name].outcome.value == "ok"}
    aliases = {d.name: Place(d).aliases for d in declarations if outcomes[d.name].outcome.value == "ok"}
    report["most_aliases"] = max(aliases, key=lambda name: len(aliases[name]))
    chosen = (report["most_aliases"], "linear_backward")
    report["broken"] = broken_engines([d for d in declarations if d.name in chosen])
    sys.stdout.write(f"{MARK}{json.dumps(report)}\n")


if __name__ == "__main__":
    main()
