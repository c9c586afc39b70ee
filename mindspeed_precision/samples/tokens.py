"""From token ids to text and back, where the user gives a tokenizer."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mindspeed_precision.errors import ConfigError, PrecisionError

BYTES = "bytes"
"""A tokenizer whose ids are the bytes of UTF-8: of this package's demo."""

_BLANKS = {"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"}


class Decoder(Protocol):
    """Turns ids into text."""

    name: str

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids; what is no id of the vocabulary is shown as ``<id>``."""
        ...

    def ids(self, text: str) -> list[int] | None:
        """Return the ids of a text; None: this tokenizer can only decode."""
        ...


class ByteDecoder:
    """Ids that are bytes; 255 and more are special."""

    name = BYTES

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        parts, held = [], bytearray()
        for one in [*ids, -1]:
            if 0 <= one < 255:
                held.append(one)
                continue
            parts.append(held.decode("utf-8", errors="replace"))
            parts.append("" if one == -1 else f"<{one}>")
            held.clear()
        return "".join(parts)

    def ids(self, text: str) -> list[int] | None:
        """Return the ids of a text."""
        return list(text.encode("utf-8"))


class VocabularyDecoder:
    """A vocabulary alone: token by id, without the rules that cut a text.

    Args:
        name: of the file.
        tokens: by id.
    """

    def __init__(self, name: str, tokens: Mapping[int, str]) -> None:
        self.name = name
        self._tokens = tokens

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return "".join(self._shown(one) for one in ids)

    def _shown(self, one: int) -> str:
        token = self._tokens.get(one, f"<{one}>")
        for mark, blank in _BLANKS.items():
            token = token.replace(mark, blank)
        return token

    def ids(self, text: str) -> list[int] | None:
        """Return None: a vocabulary does not say how a text is cut."""
        return None


class FastDecoder:
    """A ``tokenizer.json`` of Hugging Face, by its own library.

    Args:
        path: of the file.

    Raises:
        PrecisionError: the library is not installed.
        ConfigError: the library does not take the file.
    """

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            raise PrecisionError(
                "tokenizers is not installed",
                where=f"--tokenizer {path}",
                remedy="pip install 'mindspeed-precision[tokenizers]'; a vocab.json needs nothing",
            )
        from tokenizers import Tokenizer

        self.name = str(path)
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            found = " ".join(str(error).split())[:120]
            raise ConfigError("no tokenizer that can be read", where=str(path), found=found) from error

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        size = self._tokenizer.get_vocab_size()
        parts: list[str] = []
        known: list[int] = []
        for one in [*ids, -1]:
            if 0 <= one < size:
                known.append(one)
                continue
            parts.append(self._tokenizer.decode(known, skip_special_tokens=False) if known else "")
            parts.append("" if one == -1 else f"<{one}>")
            known = []
        return "".join(parts)

    def ids(self, text: str) -> list[int] | None:
        """Return the ids of a text."""
        return list(self._tokenizer.encode(text).ids)


def load_decoder(name: str) -> Decoder:
    """Load a tokenizer.

    Args:
        name: ``bytes``; a ``tokenizer.json``; a vocabulary (``.json`` of ``{token: id}``, or a text file with
            a token on each line); or a directory that has one of them. Nothing is executed or unpickled.

    Raises:
        ConfigError: there is none, or it cannot be read.
        PrecisionError: the library that reads it is not installed.
    """
    if name == BYTES:
        return ByteDecoder()
    path = Path(name)
    if path.is_dir():
        known = [path / one for one in ("tokenizer.json", "vocab.json", "vocab.txt")]
        found = next((file for file in known if file.is_file()), None)
        if found is None:
            entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
            raise ConfigError(
                "no tokenizer in this directory",
                where=str(path),
                found=entries,
                expected="tokenizer.json, vocab.json or vocab.txt",
                remedy="a tokenizer.model of sentencepiece is saved as tokenizer.json by transformers",
            )
        path = found
    if not path.is_file():
        raise ConfigError("no such tokenizer", where=name, expected=f"a file, a directory or {BYTES}")
    if path.suffix != ".json":
        return VocabularyDecoder(str(path), dict(enumerate(_text(path).splitlines())))
    return _from_json(path)


def _from_json(path: Path) -> Decoder:
    try:
        plain = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError("not readable as JSON", where=str(path), found=str(error)[:120]) from error
    if isinstance(plain, dict) and "model" in plain:
        return FastDecoder(path)
    numbers = isinstance(plain, dict) and plain and all(type(value) is int for value in plain.values())
    if not numbers:
        raise ConfigError(
            "neither a tokenizer.json nor a vocabulary", where=str(path), expected="{token: id} or a model"
        )
    return VocabularyDecoder(str(path), {number: token for token, number in plain.items()})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError("cannot be read", where=str(path), found=str(found)) from error


__all__ = ["BYTES", "Decoder", "load_decoder"]
