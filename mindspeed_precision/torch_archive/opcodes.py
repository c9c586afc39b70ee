"""Pickled data read without unpickling: plain containers and tensors, and every other global by its name.

A pickle is a program. This machine runs the part of it that builds data: numbers, text, lists, dictionaries.
A global (a class, a function) is a name here and nothing is ever imported or called: what a pickle makes of
one is kept as a ``Made``, with the arguments and state that it was given. Few names are known, those that
``torch.save`` writes for tensors and their containers. So a checkpoint is read where torch is not installed,
and no pickle can do anything.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.torch_archive.names import BYTES_OF, CONTAINERS, TENSOR_BUILDERS, bytes_of

_DEEPEST = 64
_LARGEST = 20_000_000
_MARK = object()
_PRIMITIVES = (type(None), bool, int, float, str, bytes, complex)


class Global(NamedTuple):
    """A class or function that a pickle names. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False)
class Storage:
    """The elements that tensors view.

    Attributes:
        kind: ``FloatStorage``, ``BFloat16Storage``, ``UntypedStorage`` …
        key: its name in the archive.
        numel: how many elements the pickle says it has; of an untyped storage, bytes.
    """

    kind: str
    key: str
    numel: int


@dataclass(frozen=True, eq=False)
class TensorReference:
    """A tensor: a view of a storage.

    Attributes:
        storage: what it views.
        offset: its first element.
        shape: sizes.
        stride: elements between neighbours, per dimension.
        dtype: name of the element type, where the storage has none.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str = ""


@dataclass(eq=False)
class Made:
    """What a pickle made of a global that is not known here.

    Attributes:
        of: the class or function.
        args: what it was called with.
        state: what its instance was given afterwards; None for nothing.
        items: what was put into it by key or one after another.
    """

    of: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)


def kind_of(value: Any) -> str:
    """Say what a value of a pickle is, for a message."""
    if isinstance(value, Made):
        return f"an object of the class {value.of}"
    if isinstance(value, Global):
        return f"the name {value}"
    if isinstance(value, TensorReference):
        return f"a tensor {list(value.shape)}"
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def read_pickle(data: bytes, *, where: str) -> Any:
    """Return what a pickle builds; globals as ``Global`` and ``Made``, tensors as ``TensorReference``.

    Args:
        data: the pickle.
        where: for messages.

    Raises:
        CheckpointError: it is damaged, refers to itself, is nested deeper than 64 or would unfold to more
            than twenty million values, or uses what no checkpoint needs.
    """
    try:
        root = _Machine().run(data)
        _require_tree(root)
    except CheckpointError as error:
        raise CheckpointError(error.what, where=where, found=error.found, expected=error.expected) from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, ArithmeticError) as error:
        found = " ".join(str(error).split())[:160]
        raise CheckpointError(
            "a damaged pickle", where=where, found=found or type(error).__name__, expected="a whole file"
        ) from error
    return root


class _Machine:
    """The stack machine of the pickle protocol, without the power to import or to call."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            name = opcode.name
            if name == "STOP":
                return self._pop()
            if name in _PUSHES:
                self._stack.append(argument)
            elif name in _FRESH:
                self._stack.append(_FRESH[name]())
            elif name in _GROUPS:
                self._stack.append(_GROUPS[name](self._since_mark()))
            elif name in _TUPLES:
                self._stack.append(tuple(reversed([self._pop() for _ in range(_TUPLES[name])])))
            elif name in _STEPS:
                _STEPS[name](self, argument)
            elif name not in _IGNORED:
                raise CheckpointError("a pickle that no checkpoint needs", found=f"opcode {name}")
        raise ValueError("no end")

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                found = self._stack[place + 1 :]
                del self._stack[place:]
                return found
        raise ValueError("no mark")

    def _pop(self) -> Any:
        top = self._stack.pop()
        if top is _MARK:
            raise ValueError("a mark where a value should be")
        return top

    def drop(self, _: Any) -> None:
        self._stack.pop()

    def drop_group(self, _: Any) -> None:
        self._since_mark()

    def again(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def append(self, _: Any) -> None:
        values = [self._pop()]
        _extend(self._stack[-1], values)

    def extend(self, _: Any) -> None:
        values = self._since_mark()
        _extend(self._stack[-1], values)

    def set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        _set_items(self._stack[-1], [key, value])

    def set_items(self, _: Any) -> None:
        values = self._since_mark()
        _set_items(self._stack[-1], values)

    def remember(self, argument: Any) -> None:
        self._memo[len(self._memo) if argument is None else int(argument)] = self._stack[-1]

    def recall(self, argument: Any) -> None:
        self._stack.append(self._memo[int(argument)])

    def name(self, argument: Any) -> None:
        module, _, name = str(argument).partition(" ")
        self._stack.append(Global(module, name))

    def name_of_stack(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a global that is no name")
        self._stack.append(Global(module, name))

    def make(self, _: Any) -> None:
        arguments, function = self._pop(), self._pop()
        self._stack.append(_made(function, arguments))

    def make_by_keywords(self, _: Any) -> None:
        keywords, arguments, kind = self._pop(), self._pop(), self._pop()
        self._stack.append(_made(kind, (*arguments, keywords) if keywords else arguments))

    def give_state(self, _: Any) -> None:
        state = self._pop()
        if isinstance(self._stack[-1], Made):  # attributes of plain containers are left out
            self._stack[-1].state = state

    def storage(self, _: Any) -> None:
        self._stack.append(_storage(self._pop()))


_PUSHES = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    ]
)
_FRESH: Mapping[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "EMPTY_TUPLE": tuple,
}
_GROUPS: Mapping[str, Callable[[list[Any]], Any]] = {
    "LIST": list,
    "DICT": lambda values: dict(_pairs(values)),
    "TUPLE": tuple,
    "FROZENSET": frozenset,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "POP": _Machine.drop,
    "POP_MARK": _Machine.drop_group,
    "DUP": _Machine.again,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.extend,
    "ADDITEMS": _Machine.extend,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_of_stack,
    "REDUCE": _Machine.make,
    "NEWOBJ": _Machine.make,
    "NEWOBJ_EX": _Machine.make_by_keywords,
    "BUILD": _Machine.give_state,
    "BINPERSID": _Machine.storage,
}
_IGNORED = frozenset({"PROTO", "FRAME"})


def _pairs(values: list[Any]) -> Iterable[tuple[Any, Any]]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    return zip(values[::2], values[1::2], strict=True)


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, Made):
        target.items += values
    elif isinstance(target, list):
        target.extend(values)
    elif isinstance(target, set):
        target.update(values)
    else:
        raise TypeError(f"values appended to {kind_of(target)}")


def _set_items(target: Any, values: list[Any]) -> None:
    if isinstance(target, Made):
        target.items += list(_pairs(values))
    elif isinstance(target, dict):
        target.update(_pairs(values))
    else:
        raise TypeError(f"items set in {kind_of(target)}")


def _storage(identity: Any) -> Storage:
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise TypeError("a reference to something outside of the archive that is no storage")
    _, kind, key, _, numel = identity[:5]
    if not isinstance(kind, Global) or type(numel) is not int or numel < 0:
        raise TypeError("an ill-formed storage")
    return Storage(kind=kind.name, key=str(key), numel=numel)


def _made(function: Any, arguments: Any) -> Any:
    if not isinstance(function, Global) or not isinstance(arguments, tuple):
        raise TypeError("something is called that is no global")
    if function.name == "_rebuild_from_type_v2" and len(arguments) >= 3:  # a tensor with its class and state
        return _made(arguments[0], arguments[2])
    if function.name in TENSOR_BUILDERS and arguments:
        return _tensor(arguments)
    if function.name.startswith("_rebuild_parameter") and arguments:
        return arguments[0]
    if str(function) in BYTES_OF:
        return bytes_of(arguments)
    container = CONTAINERS.get(str(function))
    return Made(function, arguments) if container is None else container(arguments)


def _tensor(arguments: tuple[Any, ...]) -> Any:
    storage, offset, shape, stride, *rest = arguments
    numbers = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or len(shape) != len(stride):
        raise TypeError("an ill-formed tensor")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a tensor of negative size")
    dtype = next((one.name for one in rest if isinstance(one, Global) and one.module == "torch"), "")
    return TensorReference(storage, offset, tuple(shape), tuple(stride), dtype)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, Made):
        return [*value.args, value.state, *value.items]
    if isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, Global):
        return value
    return ()


def _require_tree(root: Any) -> None:
    """Refuse what refers to itself, is too deep, or is small only because its parts are shared many times."""
    known: dict[int, tuple[int, int]] = {}  # by identity: depth, and size when unfolded
    open_ids: set[int] = set()
    work: list[tuple[Any, bool]] = [(root, False)]
    while work:
        value, done = work.pop()
        if isinstance(value, _PRIMITIVES) or (id(value) in known and not done):
            continue
        children = [one for one in _children(value) if not isinstance(one, _PRIMITIVES)]
        if not done:
            if id(value) in open_ids:
                raise CheckpointError("a pickle that refers to itself", expected="a tree of values")
            open_ids.add(id(value))
            work.append((value, True))
            work += [(child, False) for child in children]
            continue
        open_ids.discard(id(value))
        below = [known[id(child)] for child in children]
        depth = 1 + max((one[0] for one in below), default=0)
        size = 1 + len(list(_children(value))) + sum(one[1] for one in below)
        if depth > _DEEPEST or size > _LARGEST:
            found = f"{depth} levels" if depth > _DEEPEST else f"{size} values"
            expected = f"at most {_DEEPEST} levels and {_LARGEST} values"
            raise CheckpointError("a pickle too deep or too large", found=found, expected=expected)
        known[id(value)] = depth, size


__all__ = ["Global", "Made", "Storage", "TensorReference", "read_pickle"]
