"""A launch: which processes run which script, with what environment and arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_precision.launches.arguments import Arguments, read_arguments, typed

LAUNCHERS = ("torchrun", "msrun")
_LAUNCHING_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
_PREFIXES = ("exec", "env", "nohup", "time", "setsid", "command")
_SWITCHES = {"standalone", "no-python", "run-path", "help", "version"}
"""Options of torchrun that take no value."""
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What would be started.

    Attributes:
        head: the command up to the script's arguments: launcher, its options, the script.
        arguments: the script's arguments.
        environment: the environment that the launcher would be started with.
        launcher: ``torchrun``, ``msrun``, or empty for a script that is started by itself.
        options: options of the launcher, by name with dashes.
        script: path of the training script; empty where only arguments were given.
        source: where it was read: ``the command line``, or a file and a line.
        late: variables that a script sets after it has started the training, with where.
        unexported: variables that a script sets and does not export, with where.
        sourced: files that a script reads into itself, with the line.
    """

    head: tuple[str, ...]
    arguments: Arguments
    environment: Mapping[str, str]
    launcher: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    source: str = "the command line"
    late: Mapping[str, str] = field(default_factory=dict)
    unexported: Mapping[str, str] = field(default_factory=dict)
    sourced: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Number of processes; None where the command does not tell."""
        if self.launcher == "msrun":
            return self._option("worker-num")
        if self.launcher == "torchrun":
            here, nodes = self._option("nproc-per-node", 1), self._option("nnodes", 1)
            return None if here is None or nodes is None else here * nodes
        for name in ("WORLD_SIZE", "RANK_SIZE"):
            found = typed(self.environment.get(name, ""))
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        return 1 if self.script else None

    def _option(self, name: str, default: int | None = None) -> int | None:
        text = self.options.get(name)
        found = default if text is None else typed(text)
        return found if isinstance(found, int) else None

    def with_arguments(self, arguments: Arguments) -> Launch:
        """Return the launch with other arguments."""
        return replace(self, arguments=arguments)

    def words(self) -> list[str]:
        """Return the command."""
        return [*self.head, *self.arguments.words()]


def parse_command(words: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Take a command apart.

    Args:
        words: launcher, options, script, arguments; or a script and its arguments; or arguments alone.
        environment: with which it would be started.
    """
    rest, environment = _unwrapped(list(words), environment)
    start = len(words) - len(rest)
    if not rest or rest[0].startswith("--"):
        return Launch(head=tuple(words[:start]), arguments=read_arguments(rest), environment=environment)
    launcher, skipped = _launcher(rest)
    options, used = _options(rest[skipped:], launcher) if launcher else ({}, 0)
    script, length = _script(rest[skipped + used :])
    end = start + skipped + used + length
    return Launch(
        head=tuple(words[:end]),
        arguments=read_arguments(words[end:]),
        environment=environment,
        launcher=launcher,
        options=options,
        script=script,
    )


def _unwrapped(words: list[str], environment: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """Strip what stands before a command: ``NAME=value``, ``exec``, ``env``, ``numactl``'s options."""
    while words:
        assigned = _ASSIGNMENT.fullmatch(words[0])
        if assigned:
            environment = {**environment, assigned.group(1): assigned.group(2)}
        elif words[0] not in _PREFIXES:
            break
        words = words[1:]
    return words, environment


def _launcher(words: Sequence[str]) -> tuple[str, int]:
    """Return the launcher and how many words name it; an interpreter alone is none, and one word."""
    name = words[0].rpartition("/")[2]
    if name in LAUNCHERS:
        return name, 1
    if _PYTHON.fullmatch(words[0]):
        flags = 1
        while flags < len(words) and words[flags] in ("-u", "-B", "-s", "-I", "-E", "-O"):
            flags += 1
        if words[flags : flags + 1] == ["-W"]:
            flags += 2
        if words[flags : flags + 1] == ["-m"] and words[flags + 1 : flags + 2]:
            launcher = _LAUNCHING_MODULES.get(words[flags + 1], "")
            return launcher, flags + 2 if launcher else flags
        return "", flags
    return "", 0


def _options(words: Sequence[str], launcher: str) -> tuple[dict[str, str], int]:
    """Return a launcher's options by name, and how many words they are."""
    found: dict[str, str] = {}
    position = 0
    while position < len(words) and words[position].startswith("--"):
        name, equals, value = words[position][2:].partition("=")
        name = name.replace("_", "-")
        position += 1
        if not equals and not (launcher == "torchrun" and name in _SWITCHES) and position < len(words):
            value = words[position]
            position += 1
        found[name] = value
    return found, position


def _script(words: Sequence[str]) -> tuple[str, int]:
    """Return the training script, and how many words name it.

    A module or scripts before it (``-m mindspeed_precision.testing.cpu other.py pretrain_gpt.py``) run it.
    """
    position, script = 0, ""
    if words[:1] == ["-m"] or words[:1] == ["--module"]:
        position, script = 2, words[1] if len(words) > 1 else ""
        while position < len(words) and words[position] == "--without":
            position += 2
    elif words and not words[0].endswith(".py"):
        return (words[0], 1) if not words[0].startswith("--") else ("", 0)
    while position < len(words) and words[position].endswith(".py"):
        script = words[position]
        position += 1
    return script, position
