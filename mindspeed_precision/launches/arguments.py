"""The arguments of a training script, read leniently: what is not known is kept, not refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mindspeed_precision.launches.known import ANY_NUMBER, KnownArguments, known_arguments

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

Value = bool | int | float | str | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument as it was given.

    Attributes:
        name: without its leading dashes.
        values: what follows it.
        setting: what it sets (Megatron's ``dest``).
        joined: given as one word, ``--name=value``.
    """

    name: str
    values: tuple[str, ...]
    setting: str
    joined: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """As a shell would be given it."""
        if self.joined:
            return (f"--{self.name}={self.values[0]}",)
        return (f"--{self.name}", *self.values)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of one launch, in order.

    Attributes:
        given: each as it was given.
        positional: words before the first argument.
        stray: words behind it that belong to no argument.
        known: the table that they were read with.
    """

    given: tuple[Argument, ...]
    positional: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    known: KnownArguments

    @cached_property
    def _last(self) -> Mapping[str, Argument]:
        return {argument.setting: argument for argument in self.given}

    def has(self, setting: str) -> bool:
        """Tell whether some argument gives ``setting``."""
        return setting in self._last

    def last(self, setting: str) -> Argument | None:
        """Return the argument that decides ``setting``: the last one that gives it."""
        return self._last.get(setting)

    def value(self, setting: str) -> Value:
        """Return what ``setting`` becomes: as given, else by default, else None (of a switch: False)."""
        argument = self._last.get(setting)
        if argument is None:
            default: Value = self.known.defaults.get(
                setting, False if setting in self.known.switched else None
            )
            return default
        if argument.name in self.known.negations:
            return False
        if not argument.values:
            return True
        return typed(argument.values[0]) if len(argument.values) == 1 else argument.values

    def number(self, setting: str) -> int | float | None:
        """Return a setting that is a number; None where it is not given or is none."""
        found = self.value(setting)
        return None if isinstance(found, (bool, str, tuple)) or found is None else found

    def integer(self, setting: str, default: int = 1) -> int:
        """Return a setting that is a whole number, or ``default``."""
        found = self.number(setting)
        return found if isinstance(found, int) else default

    def on(self, setting: str) -> bool:
        """Tell whether a switch is on."""
        return self.value(setting) is True

    def words(self) -> list[str]:
        """Return them as a shell would be given them."""
        return [*self.positional, *self.stray, *(word for argument in self.given for word in argument.words)]

    def without(self, settings: Iterable[str]) -> Arguments:
        """Return them without those that give some settings."""
        left = frozenset(settings)
        return replace(self, given=tuple(one for one in self.given if one.setting not in left))

    def having(self, changes: Mapping[str, Sequence[str]]) -> Arguments:
        """Return them with other values, in place where an argument is there, else at the end.

        Args:
            changes: the values of each argument, by its name without dashes.
        """
        setting = {self.known.setting(name): name for name in changes}
        given: list[Argument] = []
        for argument in self.given:
            name = setting.get(argument.setting)
            if name is None or argument.name in self.known.negations:
                given.append(argument)
            elif argument is self._last[argument.setting]:
                given.append(replace(argument, values=tuple(changes[name]), joined=False))
        there = {argument.setting for argument in given}
        given += [
            Argument(name=name, values=tuple(values), setting=self.known.setting(name))
            for name, values in changes.items()
            if self.known.setting(name) not in there
        ]
        return replace(self, given=tuple(given))


def typed(text: str) -> Value:
    """Return a word as the number or truth that it writes, else as it is."""
    if _WHOLE.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def read_arguments(words: Sequence[str], known: KnownArguments | None = None) -> Arguments:
    """Read the arguments of a script.

    Args:
        words: as the script is given them.
        known: which there are; None: the shipped table.
    """
    table = known or known_arguments()
    given: list[Argument] = []
    positional: list[str] = []
    stray: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--") or word == "--":
            (stray if given else positional).append(word)
            continue
        name, equals, value = word[2:].partition("=")
        end = position
        most = 0 if equals else table.values.get(name, ANY_NUMBER)
        while end < len(words) and not words[end].startswith("--") and most != end - position:
            end += 1
        values = (value,) if equals else tuple(words[position:end])
        given.append(Argument(name=name, values=values, setting=table.setting(name), joined=bool(equals)))
        position = end
    return Arguments(given=tuple(given), positional=tuple(positional), stray=tuple(stray), known=table)
