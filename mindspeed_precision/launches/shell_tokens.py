"""The words of a shell script with their quotes, and what separates them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_REDIRECTION = re.compile(r"\d*[<>]{1,2}(.*)", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_SEPARATORS = "\n;|&()"


@dataclass(frozen=True)
class Token:
    """A word of the source with its quotes, or a separator; ``array``: what stands in the parentheses."""

    text: str
    line: int
    separator: bool = False
    array: bool = False


def without_redirections(tokens: list[Token]) -> list[Token]:
    """Leave out ``> file``, ``2>&1`` and their like."""
    kept: list[Token] = []
    target = False
    for token in tokens:
        redirection = _REDIRECTION.fullmatch(token.text)
        if not target and redirection is None:
            kept.append(token)
        target = redirection is not None and not redirection.group(1)
    return kept


def without_heredocs(text: str) -> str:
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


def split(text: str) -> Iterator[Token]:
    """Split a source into words with their quotes, and separators."""
    position, line, word, begun = 0, 1, "", 1
    while position < len(text):
        letter = text[position]
        if letter == "#" and not word:
            position = text.find("\n", position)
            if position < 0:
                break
            continue
        if letter == "(" and ASSIGNMENT.fullmatch(word):
            end = closing(text, position)
            yield Token(word + text[position + 1 : end - 1], begun, array=True)
            line, position, word = line + text.count("\n", position, end), end, ""
            continue
        length = _chunk(text, position)
        if length == 1 and (letter.isspace() or letter in _SEPARATORS):
            if word:
                yield Token(word, begun)
            word = ""
            if letter in _SEPARATORS:
                yield Token(letter, line, separator=True)
        else:
            begun = begun if word else line
            word += text[position : position + length]
            if text[position : position + length] == "\\\n" and word == "\\\n":
                word = ""
        line += text.count("\n", position, position + length)
        position += length
    if word:
        yield Token(word, begun)


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
        return closing(text, position + 1) - position
    if letter == "$" and text[position + 1 : position + 2] == "{":
        return (text.find("}", position) + 1 or len(text)) - position
    return 1


def closing(text: str, position: int) -> int:
    """Return the position behind the parenthesis that closes the one at ``position``."""
    depth = 0
    for end in range(position, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            return end + 1
    return len(text)
