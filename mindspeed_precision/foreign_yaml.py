"""YAML files of other people: what they say is taken as text, and nothing of this machine comes into it.

OmegaConf resolves ``${oc.env:NAME}`` to a variable of the environment, and a resolver that a training script
has registered runs that script's code. Here no file calls a resolver; ``${another.key}`` of the file is fine.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from mindspeed_precision.errors import ConfigError

_LARGEST = 1_000_000
"""Values that a file may stand for, its aliases written out."""


def load_yaml(path: Path) -> DictConfig | ListConfig:
    """Read a file that calls no resolver; interpolations are not resolved yet.

    Raises:
        ConfigError: it calls one, or its aliases stand for a million values.
        OSError: it cannot be read.
        Exception: of the YAML parser or of OmegaConf, where it is no YAML.
    """
    loaded = _load(path)
    for key, text in _calls(OmegaConf.to_container(loaded, resolve=False)):
        raise ConfigError(
            "a file may not read the environment, or call a resolver",
            where=f"{path}: {key}",
            found=text[:120],
            expected="a value, or ${another.key}",
            remedy="write the value itself, or give it on the command line",
        )
    return loaded


def read_yaml(path: Path, *, resolve: bool = True) -> Any:
    """Return a file as plain data; what calls a resolver stays as it is written.

    Args:
        path: of the file.
        resolve: whether other interpolations are resolved.

    Raises:
        ConfigError: its aliases stand for a million values.
        OSError: it cannot be read.
        Exception: of the YAML parser or of OmegaConf, where it is no YAML.
    """
    loaded = _load(path)
    plain = OmegaConf.to_container(loaded, resolve=False)
    written = dict(enumerate(text for _, text in _calls(plain)))
    if not written or not resolve:
        return OmegaConf.to_container(loaded, resolve=resolve)
    masks = {text: f"\0{number}\0" for number, text in written.items()}
    masked = OmegaConf.create(_each_text(plain, lambda text: masks.get(text, text)))

    def unmasked(text: str) -> str:
        for original, mask in masks.items():
            text = text.replace(mask, original)
        return text

    return _each_text(OmegaConf.to_container(masked, resolve=True), unmasked)


def calls_resolver(text: str) -> bool:
    """Tell whether a text holds ``${name:arguments}``; the name may be an interpolation itself."""
    depth = 0
    for position, character in enumerate(text):
        if text.startswith("${", position):
            depth += 1
        elif character == "}" and depth:
            depth -= 1
        elif character == ":" and depth:
            return True
    return False


def _load(path: Path) -> DictConfig | ListConfig:
    text = path.read_text(encoding="utf-8")
    if "&" in text:  # an anchor; without one a file is as large as it looks
        _require_small(text, path)
    return OmegaConf.load(io.StringIO(text))


def _require_small(text: str, path: Path) -> None:
    """Refuse aliases of aliases of aliases, which take no memory until each of them is written out."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = _LARGEST  # a node inside itself has no end
            sizes[id(node)] = min(_LARGEST, 1 + sum(map(size, _children(node))))
        return sizes[id(node)]

    root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if root is not None and size(root) >= _LARGEST:
        raise ConfigError(
            "its aliases stand for too many values",
            where=str(path),
            found=f"{_LARGEST} or more",
            expected=f"less than {_LARGEST}",
        )


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair


def _calls(plain: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and text of every value that calls a resolver."""
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield from _calls(value, f"{key}.{name}" if key else str(name))
    elif isinstance(plain, list):
        for number, value in enumerate(plain):
            yield from _calls(value, f"{key}[{number}]")
    elif isinstance(plain, str) and calls_resolver(plain):
        yield key, plain


def _each_text(plain: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with every text among its values changed."""
    if isinstance(plain, dict):
        return {name: _each_text(value, change) for name, value in plain.items()}
    if isinstance(plain, list):
        return [_each_text(value, change) for value in plain]
    return change(plain) if isinstance(plain, str) else plain
