"""Conditions over settings, as they stand in data: comparisons and arithmetic, and nothing else of Python."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from typing import Any

from mindspeed_precision.errors import ConfigError

Lookup = Callable[[str], Any]

_OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class UndecidedError(Exception):
    """A condition needs a number that nobody gave."""


def evaluate(text: str, lookup: Lookup) -> Any:
    """Evaluate a condition.

    Args:
        text: ``sequence_parallel and tensor_model_parallel_size == 1``.
        lookup: gives the value of a name, None where there is none.

    Raises:
        UndecidedError: it computes with, or orders, something that is no number.
        ConfigError: it is no condition.
    """
    try:
        return _value(_parsed(text), lookup)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _no_condition(text) from error


def names_of(text: str) -> frozenset[str]:
    """Return the names that a condition reads."""
    return frozenset(node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name))


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # Python's opinion of a script of the shell
        return ast.parse(text, mode="eval").body


def _value(node: ast.expr, lookup: Lookup) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return lookup(node.id)
    if isinstance(node, ast.Tuple):
        return tuple(_value(part, lookup) for part in node.elts)
    if isinstance(node, ast.BoolOp):
        return _joined(node, lookup)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(node.operand, lookup)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, lookup)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _number(node.left, lookup), _number(node.right, lookup)
        if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)) and not right:
            raise UndecidedError(ast.unparse(node))
        return _OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.Compare):
        return _compared(node, lookup)
    raise _no_condition(ast.unparse(node))


def _joined(node: ast.BoolOp, lookup: Lookup) -> bool:
    """Join parts; what decides alone decides, although another part cannot be decided."""
    decisive = isinstance(node.op, ast.Or)
    found = [_attempt(part, lookup) for part in node.values]
    undecided = [one for one in found if isinstance(one, UndecidedError)]
    if any(one is decisive for one in found):
        return decisive
    if undecided:
        raise undecided[0]
    return not decisive


def _attempt(node: ast.expr, lookup: Lookup) -> bool | UndecidedError:
    try:
        return bool(_value(node, lookup))
    except UndecidedError as error:
        return error


def _compared(node: ast.Compare, lookup: Lookup) -> bool:
    operands = [node.left, *node.comparators]
    for comparison, one, other in zip(node.ops, operands, operands[1:], strict=False):
        read = _number if isinstance(comparison, _ORDERED) else _value
        if not _OPERATIONS[type(comparison)](read(one, lookup), read(other, lookup)):
            return False
    return True


def _number(node: ast.expr, lookup: Lookup) -> Any:
    value = _value(node, lookup)
    if isinstance(value, (bool, int, float)):
        return value
    raise UndecidedError(ast.unparse(node))


def _no_condition(text: str) -> ConfigError:
    return ConfigError(
        "not a condition", where=text, expected="names, numbers, and, or, not, comparisons, + - * / // %"
    )
