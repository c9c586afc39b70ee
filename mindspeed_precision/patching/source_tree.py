"""Source trees of Megatron-LM and MindSpeed, read by ``ast``: what a module would bind, not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.patching.signatures import parameters_of_ast

_DEPTH = 8
"""How many imports, aliases and bases in a row are followed."""

_VERSION_FILES = ("__init__.py", "package_info.py", "version.py", "_version.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Found:
    """One thing that a name may be bound to.

    Attributes:
        module: where it is written.
        qualname: its path inside.
        node: the function or class, or the statement of anything else.
    """

    module: str
    qualname: str
    node: ast.AST

    @property
    def address(self) -> str:
        """``module:Qual.name``."""
        return f"{self.module}:{self.qualname}"

    @property
    def parameters(self) -> tuple[str, ...] | None:
        """The parameters of a function, in the form of ``parameters_of``; None of anything else."""
        return parameters_of_ast(self.node.args) if isinstance(self.node, Function) else None


class SourceTrees:
    """Directories that hold packages, searched in their order as ``sys.path`` would be.

    Raises:
        ConfigError: one of them is no directory.
    """

    def __init__(self, directories: Sequence[str | Path]) -> None:
        self._roots = tuple(map(Path, directories))
        self._parsed: dict[Path, ast.Module | None] = {}
        for root in self._roots:
            if not root.is_dir():
                raise ConfigError(
                    "no such source tree",
                    where=str(root),
                    expected="a directory that holds megatron or mindspeed",
                )

    def holds_package_of(self, module: str) -> bool:
        """Tell whether the package of ``module`` is here; of one without ``__init__``, the part below it."""
        first, *rest = module.split(".")
        for root in self._roots:
            package = root / first
            whole = not rest or (package / "__init__.py").is_file()
            if (package if whole else package / rest[0]).is_dir() or package.with_suffix(".py").is_file():
                return True
        return False

    def holds(self, module: str) -> bool:
        """Tell whether ``module`` is here."""
        return self._file(module) is not None

    def version(self, package: str) -> str:
        """Return the version that a package states: ``__version__``, or MAJOR, MINOR, PATCH; else nothing."""
        for root in self._roots:
            for name in _VERSION_FILES:
                constants = _constants(self._parse(root.joinpath(*package.split("."), name)))
                parts = [constants.get(key) for key in ("MAJOR", "MINOR", "PATCH")]
                stated = constants.get("__version__") or ".".join(map(str, parts))
                try:
                    return Version(str(stated)).public
                except InvalidVersion:
                    continue
        return ""

    def find(self, module: str, qualname: str) -> list[Found]:
        """Return everything that ``module:qualname`` may be bound to: several where a branch decides."""
        return self._find(module, qualname.split("."), _DEPTH)

    def elsewhere(self, module: str, qualname: str) -> Iterator[Found]:
        """Yield where the same path is defined in another module."""
        first, *_ = qualname.split(".")
        for other, text in self._texts:
            if other != module and (f"class {first}" in text or f"def {first}" in text):
                yield from (one for one in self.find(other, qualname) if one.module == other)

    def beside(self, module: str, qualname: str) -> Iterator[Found]:
        """Yield every function and method of ``module``; of a method, methods alone."""
        tree = self._tree(module)
        for node in _statements(tree) if tree is not None else ():
            if isinstance(node, Function) and "." not in qualname:
                yield Found(module=module, qualname=node.name, node=node)
            elif isinstance(node, ast.ClassDef) and "." in qualname:
                for inner in _statements(node):
                    if isinstance(inner, Function):
                        yield Found(module=module, qualname=f"{node.name}.{inner.name}", node=inner)

    def _find(self, module: str, names: Sequence[str], depth: int) -> list[Found]:
        tree = self._tree(module)
        if tree is None or not depth:
            return []
        found: list[Found] = []
        for node in _statements(tree):
            found += self._bound(module, node, names, depth)
        return found

    def _bound(self, module: str, node: ast.stmt, names: Sequence[str], depth: int) -> list[Found]:
        """Return what a statement binds to the first of ``names``, followed through the others."""
        first, *rest = names
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == first:
                    return self._find(self._imported(module, node), [alias.name, *rest], depth - 1)
        elif isinstance(node, Function | ast.ClassDef) and node.name == first:
            return self._inside(module, node, first, rest, depth)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and first in _targets(node):
            if isinstance(node.value, ast.Name) and node.value.id != first:
                return self._find(module, [node.value.id, *rest], depth - 1)
            return [] if rest else [Found(module=module, qualname=first, node=node)]
        return []

    def _inside(
        self, module: str, node: Function | ast.ClassDef, path: str, rest: Sequence[str], depth: int
    ) -> list[Found]:
        """Follow ``rest`` into a class, and into what it inherits."""
        if not rest:
            return [Found(module=module, qualname=path, node=node)]
        if not isinstance(node, ast.ClassDef) or not depth:
            return []
        first, *after = rest
        found: list[Found] = []
        for inner in _statements(node):
            if isinstance(inner, Function | ast.ClassDef) and inner.name == first:
                found += self._inside(module, inner, f"{path}.{first}", after, depth)
            elif isinstance(inner, ast.Assign | ast.AnnAssign) and first in _targets(inner):
                found.append(Found(module=module, qualname=f"{path}.{first}", node=inner))
        for base in () if found else node.bases:
            if isinstance(base, ast.Name):
                found += self._find(module, [base.id, *rest], depth - 1)
        return found

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self._file(module)
        up = node.level - (file is not None and file.name == "__init__.py")
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])

    def _file(self, module: str) -> Path | None:
        for root in self._roots:
            path = root.joinpath(*module.split("."))
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if file.is_file():
                    return file
        return None

    def _tree(self, module: str) -> ast.Module | None:
        file = self._file(module) if module else None
        return None if file is None else self._parse(file)

    def _parse(self, file: Path) -> ast.Module | None:
        if file not in self._parsed:
            self._parsed[file] = _parsed(file)
        return self._parsed[file]

    @cached_property
    def _texts(self) -> list[tuple[str, str]]:
        """Name and text of every module."""
        found = []
        for root in self._roots:
            for file in sorted(filter(Path.is_file, root.rglob("*.py"))):  # an editor's lock is a dead link
                parts = file.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found.append((name, file.read_text(encoding="utf-8", errors="replace")))
        return found


def _parsed(file: Path) -> ast.Module | None:
    if not file.is_file():
        return None
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        found = " ".join(str(error).split())[:120]
        raise ConfigError(
            "not readable as Python", where=str(file), found=found, expected="source"
        ) from error


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or a class, those under ``if``, ``try`` and ``with`` among them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler):
            yield from _statements(child)
        elif isinstance(child, ast.stmt):
            yield child
            if isinstance(child, ast.If | ast.Try | ast.With):
                yield from _statements(child)


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _constants(tree: ast.Module | None) -> dict[str, object]:
    found: dict[str, object] = {}
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found.update(dict.fromkeys(_targets(node), node.value.value))
    return found
