"""What a person calls a launch: a command, a shell script, a YAML file or arguments alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.foreign_yaml import read_yaml
from mindspeed_precision.launches.arguments import read_arguments
from mindspeed_precision.launches.command import LAUNCHERS, Launch, parse_command
from mindspeed_precision.launches.known import known_arguments
from mindspeed_precision.launches.shell import ShellCommand, ShellScript, read_script

_SHELLS = ("bash", "sh", "zsh")
_DEEPEST = 3
"""Scripts that start scripts are followed this far."""


def read_launch(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Launch:
    """Read a launch; nothing is run.

    Args:
        words: a command (``torchrun … pretrain_gpt.py --bf16``), a shell script and its arguments, a YAML
            file of arguments, or arguments alone.
        environment: with which it would be started; None: this process's.

    Raises:
        ConfigError: there are no words, a file is missing or not readable, or a script starts no training.
    """
    if not words:
        raise ConfigError(
            "no launch was given",
            where="--",
            expected="a command, a script or arguments, after --",
            remedy="for example: -- torchrun --nproc-per-node 8 pretrain_gpt.py --bf16",
        )
    launch = _read(list(words), dict(os.environ if environment is None else environment), _DEEPEST)
    return _with_yaml(launch)


def _read(words: list[str], environment: Mapping[str, str], depth: int) -> Launch:
    first = 1 if words[0] in _SHELLS and len(words) > 1 else 0
    suffix = Path(words[first]).suffix
    if suffix in (".yaml", ".yml"):
        return parse_command(_words_of_yaml(Path(words[first])) + words[first + 1 :], environment)
    if suffix != ".sh" and not first:
        return parse_command(words, environment)
    path = Path(words[first])
    script = read_script(_text(path), words[first + 1 :], environment)
    command = _training(script, path)
    inner = list(command.words)
    if depth and _is_script(inner):
        at = 0 if inner[0].endswith(".sh") else 1
        inner[at] = str(_beside(path, inner[at]))
        launch = _read(inner[at:], command.environment, depth - 1)
    else:
        launch = parse_command(inner, command.environment)
    return replace(
        launch,
        source=f"{path}:{command.line}",
        late={
            name: f"{path}:{lines[-1]}" for name, lines in script.exported.items() if lines[0] > command.line
        },
        unexported={
            name: f"{path}:{lines[-1]}" for name, lines in script.assigned.items() if lines[-1] < command.line
        },
        sourced=tuple(f"{name} ({path}:{line})" for name, line in script.sourced if line < command.line),
    )


def _training(script: ShellScript, path: Path) -> ShellCommand:
    """Return the command of a script that starts the training: the last that looks like one."""
    for wanted in (_launches, _runs_python, lambda words: _is_script(list(words))):
        found = [command for command in script.commands if wanted(command.words)]
        if found:
            return found[-1]
    raise ConfigError(
        "this script starts no training that could be seen",
        where=str(path),
        expected=f"a line with {' or '.join(LAUNCHERS)}, or with python and a script",
        remedy="give the command itself",
    )


def _launches(words: Sequence[str]) -> bool:
    names = [word.rpartition("/")[2] for word in words[:6]]
    return any(name in LAUNCHERS or name.startswith("torch.distributed.") for name in names)


def _runs_python(words: Sequence[str]) -> bool:
    return bool(re.fullmatch(r"(.*/)?python[\d.]*", words[0])) or words[0].endswith(".py")


def _is_script(words: Sequence[str]) -> bool:
    return bool(words) and (words[0].endswith(".sh") or (words[0] in _SHELLS and len(words) > 1))


def _beside(script: Path, word: str) -> Path:
    """Return the path of a script that another one starts: as written, or beside it."""
    path = Path(word)
    return path if path.is_file() or not path.name else script.parent / path.name


def _with_yaml(launch: Launch) -> Launch:
    """Add what ``--yaml-cfg`` names: Megatron takes the arguments from there."""
    named = launch.arguments.last("yaml_cfg")
    if named is None or not named.values or not Path(named.values[0]).is_file():
        return launch
    read = read_arguments(_words_of_yaml(Path(named.values[0])))
    given = (*read.given, *launch.arguments.given)
    return launch.with_arguments(replace(launch.arguments, given=given))


def _words_of_yaml(path: Path) -> list[str]:
    """Return the leaves of a YAML file as arguments, named by their last key."""
    _text(path)  # says what is wrong with the file
    try:
        plain = read_yaml(path, resolve=False)
    except ConfigError:
        raise
    except Exception as error:  # the errors of two libraries
        found = " ".join(str(error).split())[:120]
        raise ConfigError("not readable as YAML", where=str(path), found=found) from error
    if not isinstance(plain, dict):
        raise ConfigError("no arguments", where=str(path), found=type(plain).__name__, expected="a mapping")
    return [word for name, value in _leaves(plain) for word in _as_argument(name, value)]


def _leaves(plain: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield str(key), value


def _as_argument(name: str, value: Any) -> list[str]:
    """Write a key as the argument that gives it: a switch that is off as its negation, or not at all."""
    table = known_arguments()
    dashed = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        negation = next((no for no, setting in table.negations.items() if setting == name), None)
        return [f"--{dashed}"] if value else [f"--{negation}"] if negation else []
    names = [dashed, *(old for old, setting in table.renames.items() if setting == name)]
    known = next((one for one in names if one in table.values), dashed)
    values = value if isinstance(value, list) else [value]
    return [f"--{known}", *map(str, values)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError("cannot be read", where=str(path), found=str(found), expected="a file") from error
