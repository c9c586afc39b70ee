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

_NAME = re.compile(r"[A-Za-z_]\w*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_REDIRECTION = re.compile(r"\d*[<>]{1,2}(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_KEYWORDS = {"if", "then", "else", "elif", "fi", "do", "done", "while", "until", "{", "}", "!", "esac"}
_SEPARATORS = "\n;|&()"


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


@dataclass(frozen=True)
class _Token:
    """A word of the source with its quotes, or a separator; ``array``: what stands in the parentheses."""

    text: str
    line: int
    separator: bool = False
    array: bool = False


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
        command: list[_Token] = []
        for token in _tokens(_without_heredocs(text)):
            if not token.separator:
                command.append(token)
            elif command:
                self._command(command)
                command = []
        if command:
            self._command(command)
        return self._script

    def _command(self, tokens: list[_Token]) -> None:
        tokens = _without_redirections(tokens)
        while tokens and tokens[0].text in _KEYWORDS:
            tokens = tokens[1:]
        assignments = []
        while tokens and _ASSIGNMENT.match(tokens[0].text):
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

    def _declare(self, tokens: list[_Token]) -> None:
        exported = tokens[0].text == "export"
        for token in tokens[1:]:
            if _ASSIGNMENT.match(token.text):
                self._assign(token, exported=exported)
            elif exported and _NAME.fullmatch(token.text):
                value = self._variables.get(token.text)
                if isinstance(value, str):
                    self._export(token.text, value, token.line)

    def _assign(self, token: _Token, *, exported: bool) -> None:
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

    def _assignment(self, token: _Token) -> tuple[str, str | list[str]]:
        name, _, source = token.text.partition("=")
        if token.array:
            inner = [part for part in _tokens(source) if not part.separator]
            return name, [word for part in inner for word in self._expand(part)]
        return name, "".join(text for text, _ in self._pieces(source))

    def _expand(self, token: _Token) -> Iterator[str]:
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
            end = _closing(source, position)
            return self._arithmetic(source[position + 2 : end - 2]), end
        if source.startswith("(", position):
            end = _closing(source, position)
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


def _without_redirections(tokens: list[_Token]) -> list[_Token]:
    """Leave out ``> file``, ``2>&1`` and their like."""
    kept: list[_Token] = []
    target = False
    for token in tokens:
        redirection = _REDIRECTION.fullmatch(token.text)
        if not target and redirection is None:
            kept.append(token)
        target = redirection is not None and not redirection.group(1)
    return kept


def _without_heredocs(text: str) -> str:
    """Blank the lines of here-documents, so that lines keep their numbers."""
    kept, until = [], ""
    for line in text.splitlines():
        if until:
            until = "" if line.strip() == until else until
            kept.append("")
            continue
        found = _HEREDOC.search(line)
        if found and "<<<" not in line:
            until = found.group(2)
            kept.append(line[: found.start()] + line[found.end() :])
            continue
        kept.append(line)
    return "\n".join(kept)


def _tokens(text: str) -> Iterator[_Token]:
    """Split a source into words with their quotes, and separators."""
    position, line, word, begun = 0, 1, "", 1
    while position < len(text):
        letter = text[position]
        if letter == "#" and not word:
            position = text.find("\n", position)
            if position < 0:
                break
            continue
        if letter == "(" and _ASSIGNMENT.fullmatch(word):
            end = _closing(text, position)
            yield _Token(word + text[position + 1 : end - 1], begun, array=True)
            line, position, word = line + text.count("\n", position, end), end, ""
            continue
        length = _chunk(text, position)
        if length == 1 and (letter.isspace() or letter in _SEPARATORS):
            if word:
                yield _Token(word, begun)
            word = ""
            if letter in _SEPARATORS:
                yield _Token(letter, line, separator=True)
        else:
            begun = begun if word else line
            word += text[position : position + length]
            if text[position : position + length] == "\\\n" and word == "\\\n":
                word = ""
        line += text.count("\n", position, position + length)
        position += length
    if word:
        yield _Token(word, begun)


def _chunk(text: str, position: int) -> int:
    """Return how many letters at ``position`` belong together: quotes, an escape, an expansion."""
    letter = text[position]
    if letter == "\\" or text.startswith((">&", "<&"), position):
        return 2
    if letter == "'":
        return (text.find("'", position + 1) + 1 or len(text)) - position
    if letter == '"':
        end = position + 1
        while end < len(text) and text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        return min(end + 1, len(text)) - position
    if letter == "$" and text[position + 1 : position + 2] == "(":
        return _closing(text, position + 1) - position
    if letter == "$" and text[position + 1 : position + 2] == "{":
        return (text.find("}", position) + 1 or len(text)) - position
    return 1


def _closing(text: str, position: int) -> int:
    """Return the position behind the parenthesis that closes the one at ``position``."""
    depth = 0
    for end in range(position, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            return end + 1
    return len(text)
