"""Parameter lists: of a declaration's text, of a syntax tree, of a live function; names and kinds only."""

from __future__ import annotations

import ast
import inspect
from typing import Any


def parameters_of(signature: str) -> tuple[str, ...]:
    """Return the parameters of ``"(a, b=1, *, c)"`` as ``("a", "b", "*", "c")``: names and kinds only.

    Raises:
        ValueError: ``signature`` is no parameter list.
    """
    try:
        tree = ast.parse(f"def f{signature.strip()}: pass")
    except SyntaxError as error:
        raise ValueError(f"no parameter list: {signature!r}") from error
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise ValueError(f"no parameter list: {signature!r}")
    return parameters_of_ast(tree.body[0].args)


def parameters_of_ast(arguments: ast.arguments) -> tuple[str, ...]:
    """Return the parameters of a parsed function in the form of `parameters_of`."""
    names = [argument.arg for argument in arguments.posonlyargs]
    names += ["/"] if names else []
    names += [argument.arg for argument in arguments.args]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    names += [argument.arg for argument in arguments.kwonlyargs]
    return (*names, f"**{arguments.kwarg.arg}") if arguments.kwarg else tuple(names)


def parameters_found(raw: Any) -> tuple[str, ...]:
    """Return the parameters of a raw descriptor, in the form of `parameters_of`.

    Raises:
        ValueError: it has no signature (a builtin).
        TypeError: it is not callable.
    """
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    parameters = list(inspect.signature(function).parameters.values())
    names: list[str] = []
    for position, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            names.append(f"*{parameter.name}")
        elif parameter.kind is parameter.VAR_KEYWORD:
            names.append(f"**{parameter.name}")
        else:
            starred = any(name.startswith("*") for name in names)
            if parameter.kind is parameter.KEYWORD_ONLY and not starred:
                names.append("*")
            names.append(parameter.name)
            last = position + 1 == len(parameters) or parameters[position + 1].kind is not parameter.kind
            if parameter.kind is parameter.POSITIONAL_ONLY and last:
                names.append("/")
    return tuple(names)
