"""The engine on toy modules: what is set, what is restored, and what it refuses."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import textwrap
from dataclasses import replace
from types import ModuleType

import pytest

from mindspeed_precision.errors import PatchError
from mindspeed_precision.patching.declare import Called, Effect, PatchDeclaration
from mindspeed_precision.patching.session import PatchSession, Status

SEEN: list[str] = []

VICTIM = """
__version__ = "1.5.0+local"

def scale(x, factor=2):
    return x * factor

def scale_by_default(x, factor=3):
    return x * factor

class Base:
    @staticmethod
    def backward(ctx, grad_output):
        return ("static", ctx, grad_output)

    @classmethod
    def build(cls, size):
        return (cls.__name__, size)

    def method(self, x):
        return (type(self).__name__, x)

    def __iter__(self):
        yield from (1, 2, 3)

class Child(Base):
    pass
"""


def watch(wrapped, instance, args, kwargs):
    SEEN.append(getattr(wrapped, "__name__", "?"))
    return wrapped(*args, **kwargs)


def first_argument(wrapped, instance, args, kwargs):
    SEEN.append(f"{args[0]!r} of {instance!r}")
    return wrapped(*args, **kwargs)


def plus_one(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) + 1


def times_ten(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) * 10


def module(monkeypatch, name, source):
    new = ModuleType(name)
    exec(textwrap.dedent(source), new.__dict__)
    monkeypatch.setitem(sys.modules, name, new)
    return new


@pytest.fixture
def victim(monkeypatch):
    SEEN.clear()
    monkeypatch.setitem(sys.modules, "toy_wrappers", sys.modules[__name__])
    return module(monkeypatch, "toy_victim", VICTIM)


def declare(target="toy_victim:scale", signature="(x, factor)", wrapper="watch", **more):
    return PatchDeclaration(
        name=more.pop("name", target.rpartition(":")[2]),
        group="toy",
        file="toy.yaml",
        target=target,
        wrapper=f"toy_wrappers:{wrapper}",
        signatures=(signature,) if isinstance(signature, str) else signature,
        effect=more.pop("effect", Effect.OBSERVE),
        why="test",
        **more,
    )


def session(*declarations):
    return PatchSession(declarations, allow_external=True)


def test_function_is_wrapped_counted_and_restored(victim):
    original = victim.scale
    with session(declare()) as patches:
        assert victim.scale is not original
        assert victim.scale(3, factor=5) == 15
        (line,) = patches.audit()
        assert (line.status, line.calls, line.problem) == (Status.OUTERMOST, 1, "")
    assert victim.scale is original
    assert SEEN == ["scale"]
    (line,) = patches.audit()
    assert (line.status, line.calls) == (Status.UNDONE, 1)


@pytest.mark.parametrize(
    ("attribute", "signature", "call", "expected"),
    [
        ("backward", "(ctx, grad_output)", lambda cls: cls.backward(1, 2), ("static", 1, 2)),
        ("build", "(cls, size)", lambda cls: cls.build(7), ("Base", 7)),
        ("method", "(self, x)", lambda cls: cls().method(7), ("Base", 7)),
        ("__iter__", "(self)", lambda cls: tuple(cls()), (1, 2, 3)),
    ],
)
def test_raw_descriptor_is_restored(victim, attribute, signature, call, expected):
    before = vars(victim.Base)[attribute]
    with session(declare(f"toy_victim:Base.{attribute}", signature)):
        assert call(victim.Base) == expected
        assert [attribute] == SEEN
    assert vars(victim.Base)[attribute] is before
    assert call(victim.Base) == expected
    assert [attribute] == SEEN


def test_static_method_gets_all_its_arguments(victim):
    with session(declare("toy_victim:Base.backward", "(ctx, grad_output)", "first_argument")):
        victim.Base.backward("ctx", 1)
        victim.Child.backward("ctx2", 1)
    assert SEEN == ["'ctx' of None", "'ctx2' of None"]


def test_static_method_that_somebody_made_a_function_gets_all_its_arguments(victim):
    """MindSpeed reads originals by getattr and sets the plain function: ctx must not become the instance."""
    plain = victim.Base.backward
    victim.Base.backward = plain
    with session(declare("toy_victim:Base.backward", "(ctx, grad_output)", "first_argument")):
        assert victim.Base.backward("ctx", 1) == ("static", "ctx", 1)
    assert SEEN == ["'ctx' of None"]
    assert vars(victim.Base)["backward"] is plain


def test_inherited_method_is_deleted_again(victim):
    with session(declare("toy_victim:Child.backward", "(ctx, grad_output)")):
        assert "backward" in vars(victim.Child)
        victim.Child.backward(1, 2)
        victim.Base.backward(1, 2)
    assert SEEN == ["backward"]
    assert "backward" not in vars(victim.Child)


def test_constraint_lies_below_observer_whatever_the_order(victim):
    inner = declare(name="ten", wrapper="times_ten", effect=Effect.CONSTRAIN)
    outer = declare(name="one", wrapper="plus_one")
    original = victim.scale
    for declarations in ((inner, outer), (outer, inner)):
        with session(*declarations) as patches:
            assert victim.scale(1) == 1 * 2 * 10 + 1
            assert [line.status for line in patches.audit()] == [Status.OUTERMOST, Status.OUTERMOST]
        assert victim.scale is original


def test_every_problem_is_named_and_nothing_installed(victim, monkeypatch, tmp_path):
    (tmp_path / "toy_needy.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    before = {
        name: dict(vars(victim.Base)) if name == "Base" else vars(victim)[name] for name in ("Base", "scale")
    }
    broken = [
        declare(name="good"),
        declare("toy_victim:scael", name="typo"),
        declare("toy_victim:Base.backward", "(ctx, grad_output, handle)", name="drifted"),
        declare("no_such_module:f", name="nowhere"),
        declare("toy_needy:f", name="needy"),
        declare("toy_victim:Base.method", "(self, x)", wrapper="no_wrapper", name="wrapperless"),
    ]
    with pytest.raises(PatchError) as caught:
        session(*broken).install()
    text = str(caught.value)
    assert "no patch was applied" in text
    assert "typo (toy_victim:scael): toy_victim has no scael" in text
    assert "declared for (ctx, grad_output, handle), found (ctx, grad_output)" in text
    assert "nowhere (no_such_module:f): No module named 'no_such_module'\n" in text
    assert "importing toy_needy failed: ModuleNotFoundError: No module named 'no_such_dependency'" in text
    assert "no function no_wrapper" in text
    assert "good" not in text
    assert dict(vars(victim.Base)) == before["Base"]
    assert victim.scale is before["scale"]
    assert not hasattr(victim, "scael")


def test_what_fails_while_it_is_set_is_rolled_back(victim):
    class Stubborn(type):
        def __setattr__(cls, name, value):
            raise TypeError("no")

    victim.Fixed = Stubborn("Fixed", (), {"f": lambda self: None})
    original = victim.scale
    with pytest.raises(PatchError, match=r"toy_victim:Fixed\.f.*could not be set: no"):
        session(declare(), declare("toy_victim:Fixed.f", "(self)", name="fixed")).install()
    assert victim.scale is original


def test_signature_alternatives_and_opaque(victim):
    with session(declare(signature=("(x)", "(x, factor)"))):
        pass
    victim.scale = lambda *a, **k: 1
    with pytest.raises(PatchError, match=r"found \(\*a, \*\*k\)"):
        session(declare()).install()
    with session(declare(opaque=True)):
        assert victim.scale(1) == 1
    victim.scale = lambda x, **kwargs: 1
    with pytest.raises(PatchError, match=r"found \(x, \*\*kwargs\)"):
        session(declare(opaque=True)).install()
    victim.silent = min  # compiled, has no signature
    with pytest.raises(PatchError, match="has no signature"):
        session(declare("toy_victim:silent", "(x)")).install()
    with session(declare("toy_victim:silent", "(x)", opaque=True)):
        assert victim.silent(3, 2) == 2
    victim.silent = 7
    with pytest.raises(PatchError, match="has no signature"):
        session(declare("toy_victim:silent", "(x)", opaque=True)).install()


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"target": "toy_victim:absent", "optional": True}, "toy_victim has no absent"),
        ({"target": "no_such_module:f", "optional": True}, "no_such_module"),
        ({"target": "json.tool:main", "if_loaded": True}, "is not imported by this program"),
        ({"requires": ("toy_victim>=1.0,<1.5",)}, "needs toy_victim>=1.0,<1.5, found 1.5.0+local"),
        ({"requires": ("toy_victim>2",)}, "needs toy_victim>2"),
    ],
)
def test_not_applicable_is_listed(victim, monkeypatch, more, note):
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    with session(declare(**more)) as patches:
        (line,) = patches.audit()
        assert line.status is Status.NOT_APPLICABLE
        assert note in line.note
        patches.require_healthy(at="first step")
    assert "json.tool" not in sys.modules


def test_version_counts_by_its_public_part(victim):
    for requirement in ("toy_victim==1.5.0", "toy_victim>=1.5,<1.6"):
        with session(declare(requires=(requirement,))) as patches:
            assert patches.audit()[0].status is Status.OUTERMOST


def test_absent_and_required_is_refused_even_if_the_version_module_is_absent(victim):
    with pytest.raises(PatchError, match="no_such_module"):
        session(declare(requires=("no_such_module>=1",))).install()


def test_aliases_are_replaced_and_restored(victim, monkeypatch):
    early = module(monkeypatch, "toy_early", "from toy_victim import scale as renamed")
    original = victim.scale
    with session(declare()) as patches:
        assert early.renamed is victim.scale
        late = module(monkeypatch, "toy_late", "from toy_victim import scale")
        early.renamed(1)
        late.scale(1)
        assert patches.audit()[0].calls == 2
    assert early.renamed is original
    assert late.scale is original


def test_alias_in_a_stack_of_two_patches(victim, monkeypatch):
    early = module(monkeypatch, "toy_early", "from toy_victim import scale")
    original = victim.scale
    with session(declare(name="a", wrapper="plus_one"), declare(name="b", wrapper="times_ten")):
        assert early.scale(1) == (1 * 2 + 1) * 10
    assert early.scale is original


def test_one_function_declared_at_two_places_counts_once(victim, monkeypatch):
    other = module(monkeypatch, "toy_other", "from toy_victim import scale")
    original = victim.scale
    with session(declare(), declare("toy_other:scale", name="same")) as patches:
        other.scale(1)
        victim.scale(1)
        first, second = patches.audit()
        assert first.calls == 2
        assert second.status is Status.NOT_APPLICABLE
        assert "the same function as toy_victim:scale" in second.note
    assert other.scale is original
    with session(declare(), declare("toy_other:scale", name="other", wrapper="plus_one")) as patches:
        assert other.scale(1) == victim.scale(1) == 3
    assert other.scale is original
    assert victim.scale is original


def test_lazy_modules_are_not_triggered(victim, monkeypatch, tmp_path):
    lazy = module(monkeypatch, "toy_lazy", "def __getattr__(name):\n    raise AssertionError(name)")

    class Touchy(ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "toy_touchy", Touchy("toy_touchy"))
    (tmp_path / "toy_deferred.py").write_text("raise AssertionError('loaded')")
    spec = importlib.util.spec_from_file_location("toy_deferred", tmp_path / "toy_deferred.py")
    deferred = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy_deferred", deferred)
    importlib.util.LazyLoader(spec.loader).exec_module(deferred)
    monkeypatch.setitem(sys.modules, "toy_none", None)
    with session(declare()):
        victim.scale(1)
    assert lazy is not None
    with pytest.raises(AssertionError, match="loaded"):
        deferred.anything  # noqa: B018  # the deferred module was still unloaded


def test_displaced_is_an_error_with_its_name(victim):
    original = victim.scale
    with session(declare()) as patches:
        victim.scale = original  # somebody rebuilds from the first original
        (line,) = patches.audit()
        assert line.status is Status.DISPLACED
        with pytest.raises(PatchError, match=r"scale \(toy_victim:scale\): was replaced by toy_victim.scale"):
            patches.require_healthy(at="start")
    assert victim.scale is original


def test_displaced_after_it_was_called(victim):
    original = victim.scale
    with session(declare()) as patches:
        victim.scale(1)
        patches.require_healthy(at="first step")
        victim.scale = lambda x, factor=2: original(x, factor)
        victim.scale(1)
        assert patches.audit()[0].status is Status.DISPLACED


def test_displaced_alias(victim, monkeypatch):
    early = module(monkeypatch, "toy_early", "from toy_victim import scale")
    original = victim.scale
    with session(declare()) as patches:
        early.scale = original
        (line,) = patches.audit()
        assert line.status is Status.DISPLACED
        assert "toy_early.scale" in line.problem


def closure(ours):
    def cover(*args, **kwargs):
        return ours(*args, **kwargs)

    return cover


def wraps(ours):
    @functools.wraps(ours)
    def outer(*args, **kwargs):
        return ours(*args, **kwargs)

    return outer


class CallableObject:
    def __init__(self, ours):
        self.ours = ours

    def __call__(self, *args, **kwargs):
        return self.ours(*args, **kwargs)


@pytest.mark.parametrize("cover", [closure, wraps, CallableObject, functools.partial])
def test_covered_is_healthy_and_not_buried(victim, cover, caplog):
    with session(declare()) as patches:
        ours = victim.scale
        victim.scale = strange = cover(ours)
        assert patches.audit()[0].status is Status.COVERED
        assert victim.scale(2) == 4
        patches.require_healthy(at="first step")
        caplog.set_level(logging.WARNING)
    assert victim.scale is strange
    assert "stays" in caplog.text
    SEEN.clear()
    assert victim.scale(2) == 4
    assert SEEN == []
    (line,) = patches.audit()
    assert line.status is Status.UNDONE
    assert "was set over toy_victim:scale and stays" in line.note


def test_covered_static_method_that_was_read_by_getattr(victim):
    """What getattr gives of a wrapped static method is bound, and wraps the original, not our wrapper."""
    with session(declare("toy_victim:Base.backward", "(ctx, grad_output)")) as patches:
        victim.Base.backward = wraps(victim.Base.backward)
        assert patches.audit()[0].status is Status.COVERED
        victim.Base.backward(1, 2)
        assert patches.audit()[0].calls == 1


def test_hidden_but_called_is_covered(victim):
    hidden = []
    with session(declare()) as patches:
        hidden.append(victim.scale)
        victim.scale = lambda x, factor=2: hidden[0](x, factor)
        victim.scale(1)
        assert patches.audit()[0].status is Status.COVERED
        patches.require_healthy(at="first step")
        assert patches.audit()[0].status is Status.DISPLACED
        victim.scale(1)
        assert [patches.audit()[0].status for _ in range(2)] == [Status.COVERED] * 2


def test_stranger_on_a_class_stays(victim):
    with session(declare("toy_victim:Base.backward", "(ctx, grad_output)")) as patches:
        victim.Base.backward = stranger = staticmethod(lambda ctx, grad_output: 0)
        notes = patches.undo()
    assert vars(victim.Base)["backward"] is stranger
    assert len(notes) == 1
    assert patches.undo() == ()


def test_never_called(victim):
    declarations = [
        declare(name="at_start", called=Called.START),
        declare("toy_victim:Base.method", "(self, x)", name="at_step", called=Called.STEP),
        declare("toy_victim:Base.build", "(cls, size)", name="perhaps", called=Called.MAYBE),
    ]
    with session(*declarations) as patches:
        with pytest.raises(PatchError) as caught:
            patches.require_healthy(at="start")
        assert "at_start" in str(caught.value)
        assert "at_step" not in str(caught.value)
        victim.scale(1)
        patches.require_healthy(at="start")
        with pytest.raises(PatchError) as caught:
            patches.require_healthy(at="first step")
        assert "at_step (toy_victim:Base.method): was never called" in str(caught.value)
        assert "perhaps" not in str(caught.value)
        patches.require_healthy(at="first step", excused=["at_step"])
        victim.Base().method(1)
        patches.require_healthy(at="first step")


def test_one_of_several(victim):
    declarations = [
        declare(any_of="scaling"),
        declare("toy_victim:scale_by_default", any_of="scaling"),
    ]
    with session(*declarations) as patches:
        with pytest.raises(PatchError):
            patches.require_healthy(at="first step")
        victim.scale_by_default(1)
        patches.require_healthy(at="first step")


def test_second_install_is_refused_and_reinstall_works(victim):
    patches = session(declare())
    patches.install()
    with pytest.raises(PatchError, match="installed already"):
        patches.install()
    with pytest.raises(PatchError, match="another session"):
        session(declare()).install()
    victim.scale = wraps(victim.scale)
    with pytest.raises(PatchError, match="another session"):
        session(declare()).install()
    victim.scale = victim.scale.__wrapped__
    patches.undo()
    patches.install()
    victim.scale(1)
    assert patches.audit()[0].calls == 1
    patches.undo()


def test_error_of_the_program_passes_and_patches_are_undone(victim):
    original = victim.scale
    with pytest.raises(ZeroDivisionError), session(declare()):
        1 / 0  # noqa: B018
    assert victim.scale is original


def test_external_wrapper_needs_leave(victim):
    with pytest.raises(PatchError, match=r"outside mindspeed_precision.*patches\.allow_external=true"):
        PatchSession([declare()]).install()


@pytest.mark.parametrize("name", ["Enum", "Version"])
def test_what_a_module_of_ours_imports_is_external_too(victim, name):
    declaration = replace(declare(), wrapper=f"mindspeed_precision.patching.resolve:{name}")
    with pytest.raises(PatchError, match="outside mindspeed_precision"):
        PatchSession([declaration]).install()


def test_a_wrapper_cannot_name_the_program(victim):
    """Importing it ran the commands, and ended the training."""
    sys.modules.pop("mindspeed_precision.__main__", None)
    declaration = replace(declare(), wrapper="mindspeed_precision.__main__:nothing")
    with pytest.raises(PatchError, match="has no function nothing"):
        PatchSession([declaration]).install()


def test_engine_runs_without_torch():
    """The whole engine, in a process where importing torch fails."""
    import subprocess

    program = """
    import sys
    sys.modules["torch"] = None
    from mindspeed_precision.patching.declare import load_declarations
    from mindspeed_precision.patching.session import PatchSession
    assert load_declarations()
    PatchSession([]).install()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
