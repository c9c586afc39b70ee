"""What is patched, as data: ``patches/*.yaml`` read into frozen declarations.

A patch is written once, here; installing, undoing, the audit, the documentation and the conformance
tests all read this record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.requirements import InvalidRequirement, Requirement

from mindspeed_precision.config import data_directory
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.foreign_yaml import load_yaml
from mindspeed_precision.patching.signatures import parameters_of

SCHEMA = 1


class Effect(str, Enum):
    """What a patch does to the numbers of the run."""

    OBSERVE = "observe"
    """Changes no bit."""
    CONSTRAIN = "constrain"
    """Changes bits on purpose (a remedy)."""


class Called(str, Enum):
    """When a patch must have been called at the latest."""

    START = "start"
    """When the training loop starts."""
    STEP = "step"
    """At the end of the first step."""
    MAYBE = "maybe"
    """Cannot be promised: the configuration decides."""


@dataclass(frozen=True, kw_only=True)
class PatchDeclaration:
    """One patch, as written in ``patches/<group>.yaml``.

    Attributes:
        name: unique name, for reports and settings.
        group: the file's name without suffix; patches are enabled by group (remedies by name).
        file: where it is declared.
        target: ``module:Qual.name`` of the attribute that is replaced.
        wrapper: ``module:function`` with wrapt's signature ``(wrapped, instance, args, kwargs)``.
        signatures: the parameter lists that the wrapper was written for, one per generation of the target;
            names and kinds count, annotations and defaults do not.
        effect: whether bits may change.
        why: why the product needs it.
        requires: ``module>=1.0,<2.0``; outside, the patch is not applicable.
        optional: an absent target is not an error.
        opaque: the target may be wrapped already and report ``(*args, **kwargs)``, or be compiled and report
            nothing.
        if_loaded: only patched when its module is imported already (importing it would have side effects).
        called: when it must have been called at the latest.
        any_of: patches that share this label stand in for each other: one call of any of them will do.
    """

    name: str
    group: str
    file: str
    target: str
    wrapper: str
    signatures: tuple[str, ...]
    effect: Effect
    why: str
    requires: tuple[str, ...] = ()
    optional: bool = False
    opaque: bool = False
    if_loaded: bool = False
    called: Called = Called.STEP
    any_of: str = ""

    @property
    def module(self) -> str:
        """Module part of the target."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """Attribute path of the target inside its module."""
        return self.target.partition(":")[2]


@dataclass
class _Patch:
    name: str = MISSING
    target: str = MISSING
    wrapper: str = MISSING
    signature: Any = MISSING
    effect: str = MISSING
    why: str = MISSING
    requires: list[str] = field(default_factory=list)
    optional: bool = False
    opaque: bool = False
    if_loaded: bool = False
    called: str = Called.STEP.value
    any_of: str = ""


@dataclass
class _File:
    schema: int = MISSING
    name: str = MISSING
    requires: list[str] = field(default_factory=list)
    patches: list[Any] = MISSING


def load_declarations(search_path: Sequence[str | Path] = ()) -> tuple[PatchDeclaration, ...]:
    """Read every declaration that ships, then those of the user's directories, in the order of file names.

    Args:
        search_path: further directories that hold ``*.yaml`` declarations (``patches.search_path``).

    Raises:
        ConfigError: a directory is missing, a file does not fit the schema, or two patches share a name.
    """
    declarations: list[PatchDeclaration] = []
    for directory in (data_directory("patches"), *map(Path, search_path)):
        if not directory.is_dir():
            raise ConfigError(
                "no such directory of patches",
                where=str(directory),
                remedy="see patches.search_path in the settings",
            )
        for file in sorted(directory.glob("*.yaml")):
            declarations += load_file(file)
    for name, count in Counter(declaration.name for declaration in declarations).items():
        if count > 1:
            files = [declaration.file for declaration in declarations if declaration.name == name]
            raise ConfigError(
                "two patches share a name", where=f"{files[-1]}: {name}", found=f"also in {files[0]}"
            )
    return tuple(declarations)


def shipped_groups() -> frozenset[str]:
    """Return the groups of the declarations that ship: a file's name is its group's."""
    return frozenset(file.stem for file in data_directory("patches").glob("*.yaml"))


def select(
    declarations: Iterable[PatchDeclaration], *, groups: Sequence[str] = (), names: Sequence[str] = ()
) -> tuple[PatchDeclaration, ...]:
    """Return the patches of ``groups`` and those called ``names``, in the order of ``declarations``.

    Raises:
        ConfigError: a group or a name is unknown.
    """
    every = tuple(declarations)
    for wanted, known, kind in (
        (groups, {declaration.group for declaration in every}, "group of patches"),
        (names, {declaration.name for declaration in every}, "patch"),
    ):
        for word in wanted:
            if word not in known:
                raise ConfigError(
                    f"no such {kind}", where=word, expected=f"one of {', '.join(sorted(known))}"
                )
    return tuple(d for d in every if d.group in groups or d.name in names)


def load_file(file: Path) -> tuple[PatchDeclaration, ...]:
    """Read one file of declarations.

    Raises:
        ConfigError: with the file and the key in ``where``.
    """
    status = file.stat() if file.is_file() else None
    return _read_file(file, (status.st_mtime_ns, status.st_size) if status else None)


@cache
def _read_file(file: Path, state: tuple[int, int] | None) -> tuple[PatchDeclaration, ...]:
    """Read a file of that modification time and size: half a second for what ships, so once per process."""
    plain = _fit(file, "", _File, _load_yaml(file))
    if plain["schema"] != SCHEMA:
        raise ConfigError(
            "unknown schema", where=_place(file, "schema"), found=str(plain["schema"]), expected=str(SCHEMA)
        )
    if plain["name"] != file.stem:
        raise ConfigError(
            "not the name of the file", where=_place(file, "name"), found=plain["name"], expected=file.stem
        )
    return tuple(
        _declaration(file, index, _fit(file, f"patches[{index}].", _Patch, patch), plain["requires"])
        for index, patch in enumerate(plain["patches"])
    )


def parse_requirement(text: str) -> Requirement:
    """Read ``"megatron.core>=0.12,<0.20"``.

    Raises:
        ValueError: it is no requirement, or has extras, an address or a marker.
    """
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"no requirement: {text!r}") from error
    if requirement.extras or requirement.url or requirement.marker or not requirement.specifier:
        raise ValueError(f"a requirement is a module and its versions: {text!r}")
    return requirement


def _load_yaml(file: Path) -> object:
    try:
        return load_yaml(file)
    except ConfigError:
        raise
    except Exception as error:  # of the file system, of OmegaConf, or of its YAML parser
        message = " ".join(str(error).split())
        raise ConfigError(f"not readable as YAML: {message}", where=str(file)) from error


def _fit(file: Path, prefix: str, schema: type, loaded: object) -> dict[str, Any]:
    """Check ``loaded`` against ``schema``; lists of a schema are fitted one by one, to name their index."""
    if not isinstance(loaded, (dict, DictConfig)):
        raise ConfigError(
            "not a mapping",
            where=_place(file, prefix.rstrip(".")),
            found=repr(loaded),
            expected="key: value lines",
        )
    for entry in fields(schema):
        value = loaded.get(entry.name, [])
        if str(entry.type).startswith("list") and not isinstance(value, (list, ListConfig)):
            where = _place(file, f"{prefix}{entry.name}")
            raise ConfigError("not a list", where=where, found=repr(value), remedy="see patches/README.md")
    try:
        merged = OmegaConf.merge(_structured(schema), loaded)
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{prefix}{getattr(error, 'full_key', None) or ''}"
        message = str(error).splitlines()[0].replace(schema.__name__, "a declaration")
        raise ConfigError(message, where=_place(file, key), remedy="see patches/README.md") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@cache
def _structured(schema: type) -> DictConfig:
    """Return the schema as OmegaConf has it; a merge copies it."""
    structured = OmegaConf.structured(schema)
    assert isinstance(structured, DictConfig)
    return structured


def _place(file: Path, key: str) -> str:
    return f"{file}: {key}" if key else str(file)


def _declaration(file: Path, index: int, patch: dict[str, Any], requires: Sequence[str]) -> PatchDeclaration:
    signature = patch.pop("signature")
    signatures = tuple(signature) if isinstance(signature, list) else (signature,)
    requirements = (*requires, *patch.pop("requires"))
    checks: dict[str, tuple[Callable[[Any], object], Sequence[Any]]] = {
        "target": (_check_address, [patch["target"]]),
        "wrapper": (_check_address, [patch["wrapper"]]),
        "why": (_check_reason, [patch["why"]]),
        "effect": (Effect, [patch["effect"]]),
        "called": (Called, [patch["called"]]),
        "signature": (_check_signatures, [signatures]),
        "requires": (parse_requirement, requirements),
    }
    for key, (check, values) in checks.items():
        wrong = _problem(check, values)
        if wrong:
            where = _place(file, f"patches[{index}].{key} ({patch['name']})")
            raise ConfigError(wrong, where=where, remedy="see patches/README.md")
    patch.update(effect=Effect(patch["effect"]), called=Called(patch["called"]))
    return PatchDeclaration(
        group=file.stem, file=file.name, signatures=signatures, requires=requirements, **patch
    )


def _check_address(text: str) -> None:
    module, colon, attribute = text.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))):
        raise ValueError(f"not an address like package.module:Class.method: {text!r}")


def _check_reason(text: str) -> None:
    if not text.strip():
        raise ValueError("a patch needs a reason")


def _check_signatures(signatures: Sequence[object]) -> None:
    if not signatures:
        raise ValueError("a patch needs a signature")
    for signature in signatures:
        if not isinstance(signature, str):
            raise TypeError(f"no parameter list: {signature!r}")
        parameters_of(signature)


def _problem(check: Callable[[Any], object], values: Iterable[Any]) -> str:
    try:
        for value in values:
            check(value)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""
