"""A shell script read without running it: which variables it sets, and which commands it would start.

Enough of the language for launch scripts: assignments, arrays, exports, quotes, ``$NAME``,
``${NAME:-default}``, ``$((…))``, ``"$@"``, continued lines, here-documents. Control flow is read straight
through. What a command would print (``$(…)``) and variables that nobody sets stay in the words as they are
written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches.conditions import UndecidedError, evaluate
from mindspeed_precision.launches.shell_tokens import (
    ASSIGNMENT,
    Token,
    closing,
    split,
    without_heredocs,
    without_redirections,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_KEYWORDS = {"if", "then", "else", "elif", "fi", "do", "done", "while", "until", "{", "}", "!", "esac"}


@dataclass(frozen=True, kw_only=True)
class ShellCommand:
    """A command that a script would start.

    Attributes:
        words: expanded.
        line: line of the script, from 1.
        environment: what it would be started with.
    """

    words: tuple[str, ...]
    line: int
    environment: Mapping[str, str]


@dataclass
class ShellScript:
    """What was read of a script.

    Attributes:
        commands: in order.
        exported: lines at which a variable is exported, by name.
        assigned: lines at which a variable is set and not exported, by name.
        sourced: files that are read into it, with their lines.
    """

    commands: list[ShellCommand] = field(default_factory=list)
    exported: dict[str, list[int]] = field(default_factory=dict)
    assigned: dict[str, list[int]] = field(default_factory=dict)
    sourced: list[tuple[str, int]] = field(default_factory=list)


def read_script(text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ShellScript:
    """Read a script.

    Args:
        text: its source.
        arguments: its positional arguments.
        environment: with which it would be started.
    """
    return _Reader(arguments, environment).read(text)


class _Reader:
    """The variables of a script while it is read from top to bottom."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._variables: dict[str, str | list[str]] = dict(environment)
        self._variables["@"] = list(arguments)
        self._environment = dict(environment)
        self._script = ShellScript()

    def read(self, text: str) -> ShellScript:
        command: list[Token] = []
        for token in split(without_heredocs(text)):
            if not token.separator:
                command.append(token)
            elif command:
                self._command(command)
                command = []
        if command:
            self._command(command)
        return self._script

    def _command(self, tokens: list[Token]) -> None:
        tokens = without_redirections(tokens)
        while tokens and tokens[0].text in _KEYWORDS:
            tokens = tokens[1:]
        assignments = []
        while tokens and ASSIGNMENT.match(tokens[0].text):
            assignments.append(tokens[0])
            tokens = tokens[1:]
        if not tokens:
            for token in assignments:
                self._assign(token, exported=False)
            return
        if tokens[0].text in ("export", "declare", "local", "readonly"):
            self._declare(tokens)
            return
        words = [word for token in tokens for word in self._expand(token)]
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            self._script.sourced.append((words[1], tokens[0].line))
        elif words:
            prefix = {
                name: value for name, value in map(self._assignment, assignments) if isinstance(value, str)
            }
            self._script.commands.append(
                ShellCommand(
                    words=tuple(words), line=tokens[0].line, environment={**self._environment, **prefix}
                )
            )

    def _declare(self, tokens: list[Token]) -> None:
        exported = tokens[0].text == "export"
        for token in tokens[1:]:
            if ASSIGNMENT.match(token.text):
                self._assign(token, exported=exported)
            elif exported and _NAME.fullmatch(token.text):
                value = self._variables.get(token.text)
                if isinstance(value, str):
                    self._export(token.text, value, token.line)

    def _assign(self, token: Token, *, exported: bool) -> None:
        name, value = self._assignment(token)
        self._variables[name] = value
        # a variable that came with the environment stays exported when it is set again
        if isinstance(value, str) and (exported or name in self._environment):
            self._export(name, value, token.line)
        elif isinstance(value, str):
            self._script.assigned.setdefault(name, []).append(token.line)

    def _export(self, name: str, value: str, line: int) -> None:
        self._environment[name] = value
        self._script.exported.setdefault(name, []).append(line)
        self._script.assigned.pop(name, None)

    def _assignment(self, token: Token) -> tuple[str, str | list[str]]:
        name, _, source = token.text.partition("=")
        if token.array:
            inner = [part for part in split(source) if not part.separator]
            return name, [word for part in inner for word in self._expand(part)]
        return name, "".join(text for text, _ in self._pieces(source))

    def _expand(self, token: Token) -> Iterator[str]:
        """Yield the words that a token becomes: what is not quoted splits at blanks."""
        if token.text in ('"$@"', "$@", '"${@}"'):
            yield from self._variables["@"]
            return
        whole = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', token.text)
        if whole and isinstance(self._variables.get(whole.group(1)), list):
            yield from self._variables[whole.group(1)]
            return
        word: str | None = None
        for text, quoted in self._pieces(token.text):
            if quoted:
                word = (word or "") + text
                continue
            parts = re.split(r"\s+", text)
            for number, part in enumerate(parts):
                if number and word is not None:
                    yield word
                    word = None
                if part:
                    word = (word or "") + part
        if word is not None:
            yield word

    def _pieces(self, source: str) -> Iterator[tuple[str, bool]]:
        """Yield (text, quoted) of a word's source, variables replaced."""
        position, quote = 0, ""
        while position < len(source):
            letter = source[position]
            if letter == "\\" and quote != "'":
                following = source[position + 1 : position + 2]
                yield ("" if following == "\n" else following), bool(quote) or following != "\n"
                position += 2
            elif letter in "'\"" and quote in ("", letter):
                quote = "" if quote else letter
                yield "", True
                position += 1
            elif letter == "$" and quote != "'":
                text, position = self._variable(source, position + 1)
                yield text, bool(quote)
            else:
                yield letter, bool(quote)
                position += 1

    def _variable(self, source: str, position: int) -> tuple[str, int]:
        """Return what ``$…`` at ``position`` stands for, and where it ends."""
        if source.startswith("((", position):
            end = closing(source, position)
            return self._arithmetic(source[position + 2 : end - 2]), end
        if source.startswith("(", position):
            end = closing(source, position)
            return f"${source[position:end]}", end
        if source.startswith("{", position):
            end = source.find("}", position) + 1 or len(source)
            if source.startswith("{#", position):
                return self._length(source[position + 2 : end - 1]), end
            name, default = re.match(
                r"([\w@#]*)(?:\[[@*]\])?:?[-=]?(.*)", source[position + 1 : end - 1], re.DOTALL
            ).groups()  # type: ignore[union-attr]
            expanded = "".join(text for text, _ in self._pieces(default)) if default else None
            return self._value(name, expanded, f"${source[position:end]}"), end
        found = _NAME.match(source, position) or re.compile(r"[@#*\d?]").match(source, position)
        if found is None:
            return "$", position
        return self._value(found.group(), None, f"${found.group()}"), found.end()

    def _length(self, name: str) -> str:
        value = self._variables.get(re.sub(r"\[[@*]\]", "", name))
        return "${#" + name + "}" if value is None else str(len(value))

    def _value(self, name: str, default: str | None, written: str) -> str:
        value = self._variables.get(name, default if default is not None else written)
        if name.isdigit():
            given = self._variables["@"]
            value = given[int(name) - 1] if 0 < int(name) <= len(given) else default or written
        return " ".join(value) if isinstance(value, list) else value

    def _arithmetic(self, source: str) -> str:
        text = "".join(piece for piece, _ in self._pieces(source))
        numbers = {
            name: int(value)
            for name, value in self._variables.items()
            if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value)
        }
        try:
            return str(int(evaluate(text.replace("/", "//").strip(), numbers.get)))
        except (UndecidedError, ConfigError, ValueError, TypeError):
            return f"$(({source}))"
