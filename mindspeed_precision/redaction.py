"""Secrets, taken out of what is written and shown: tokens, keys and passwords in settings, arguments, texts.

What stands in their place tells whether two are the same and little else: 16 bits of a slow hash (PBKDF2). A
fast hash of a password could be tried out word by word; a salt of each run's own would make two runs
incomparable; and 16 bits fit so many words that even a slow search ends with a crowd of candidates. Two
different secrets look alike once in 65 536 times, and no number of a training depends on them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_SALT = b"mindspeed_precision.redaction.1"
_ROUNDS = 100_000
_MOST = 16
"""Hashes per document: each takes a tenth of a second, and a document may come from anybody."""

_MARK = "<redacted"
_SECRETS = {"secret", "password", "passwd", "passphrase", "credential", "apikey", "pwd", "jwt"}
_KEYS = {
    *("api", "access", "private", "secret", "auth", "account", "signing", "encryption", "license"),
    *("ssh", "wandb", "comet", "neptune"),
}
_NOT_ITSELF = {"file", "path", "dir", "type", "policy", "count", "length", "size", "num", "id", "name", "url"}
"""``password_file`` names a file; ids are told by their form."""
_VOCABULARY = {
    *("pad", "eos", "bos", "eod", "sep", "cls", "mask", "unk", "image", "img", "video", "audio", "special"),
    *("per", "prompt", "start", "end", "class", "stop", "prefix", "suffix", "middle", "vision", "text"),
    "box",
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_FORMS = tuple(
    re.compile(rf"(?<![\w-]){form}")
    for form in (
        r"hf_[A-Za-z0-9]{20,}",
        r"gh[pousr]_[A-Za-z0-9]{20,}",
        r"github_pat_\w{20,}",
        r"glpat-[\w-]{16,}",
        r"npm_[A-Za-z0-9]{30,}",
        r"pypi-[\w-]{40,}",
        r"xox[abprs]-[\w-]{10,}",
        r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])",
        r"AIza[\w-]{35}",
        r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
        r"sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}",
    )
)
_SUSPECT = re.compile(r"[=:\s]|hf_|gh[pousr]_|github_pat_|glpat-|npm_|pypi-|xox|AKIA|ASIA|AIza|eyJ|sk-")
"""What every form has some of; most names and numbers have none."""
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,40}-----)?")
_IN_URL = re.compile(r"(://[^/\s:@]*:)([^/\s]+)(?=@)")
_ALONE_IN_URL = re.compile(r"(https?://)((?=[^/\s:@]*\d)[^/\s:@]{16,})(?=@)")
_IN_QUERY = re.compile(
    r"(?i)([?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|[\w-]*token)=)([^&\s'\"#<]+)"
)
_BEARER = re.compile(r"(?i)(?<!\w)((?:bearer|basic|authorization:\s*\w+)\s+)([\w.~+/-]{16,}=*)")
_NAME = re.compile(r"""(?<![\w.-])(-{0,2}[A-Za-z_][\w.-]*)(\\?["']?\s*[=:]\s*|\s+)""")
_VALUE = re.compile(r"""\\"[^"\\]*\\"|"(?:[^"\\]|\\.)*"|'[^']*'|["']?[^\s,;&"']+""")
"""The first is a text of JSON within a text of JSON."""
_ASSIGNED = re.compile(r"(-{1,2}[A-Za-z_][\w.-]*=|[A-Z_][A-Z0-9_]*=)(.+)", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Tell whether a setting, an argument or a variable of this name holds a secret.

    ``HF_TOKEN``, ``wandb-api-key`` and ``dbPassword`` do; ``tokenizer``, ``num_tokens``, ``pad_token`` don't.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _NOT_ITSELF:
        return False
    if any(word in _SECRETS or word.removesuffix("s") in _SECRETS for word in words):
        return True
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("key", "keys"):
        return before in _KEYS
    return last == "token" and before not in _VOCABULARY


@lru_cache(maxsize=1024)
def redacted(secret: str) -> str:
    """Return what stands for a secret: the same for the same one."""
    digest = hashlib.pbkdf2_hmac("sha256", secret.encode("utf-8", "surrogatepass"), _SALT, _ROUNDS)
    return f"{_MARK}, {digest.hex()[:4]}>"


def redact_text(text: str) -> str:
    """Return ``text`` without what looks like a secret, or follows the name of one."""
    return _Redaction().text(text)


def redact_words(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of secret options."""
    return _Redaction().words(list(words))


def redact(plain: Any) -> Any:
    """Return plain data (mappings, lists, scalars) without secrets; a second time changes nothing."""
    return _Redaction().value(plain)


class _Redaction:
    """One document: how many secrets were hashed in it."""

    def __init__(self) -> None:
        self._hashed: dict[str, str] = {}

    def value(self, plain: Any) -> Any:
        if isinstance(plain, Mapping):
            return {name: self._entry(str(name), item) for name, item in plain.items()}
        if isinstance(plain, (list, tuple)):
            if plain and all(isinstance(item, str) for item in plain):
                return self.words(list(plain))
            return [self.value(item) for item in plain]
        return self.text(plain) if isinstance(plain, str) else plain

    def _entry(self, name: str, item: Any) -> Any:
        hidden = isinstance(item, (str, list, tuple)) or type(item) in (int, float)
        if not (hidden and item and is_secret_name(name)):
            return self.value(item)
        if name.lower().endswith("token") and not _like_a_token(item):
            return self.value(item)
        return self._hash(item if isinstance(item, str) else repr(item))

    def words(self, words: list[str]) -> list[str]:
        """A word behind a secret option is its value."""
        found = []
        for before, word in zip(["", *words], words, strict=False):
            option = before.startswith("-") and "=" not in before and is_secret_name(before)
            hidden = option and not word.startswith("--")
            found.append(self._hash(word) if hidden else self._assigned(word))
        return found

    def _assigned(self, word: str) -> str:
        """A word that gives a secret its value is that value to its end: ``--password=a,b c``."""
        match = _ASSIGNED.fullmatch(word)
        if match is None or not is_secret_name(match[1]) or match[1].lower().endswith("token="):
            return self.text(word)
        return match[1] + self._hash(match[2])

    def text(self, text: str) -> str:
        if text.startswith(_MARK) or not _SUSPECT.search(text):
            return text
        for form in _FORMS:
            text = form.sub(lambda match: self._hash(match.group()), text)
        text = _PRIVATE_KEY.sub(lambda match: self._hash(match.group()), text)
        text = _IN_URL.sub(lambda match: match.group(1) + self._hash(match.group(2)), text)
        text = _ALONE_IN_URL.sub(lambda match: match.group(1) + self._hash(match.group(2)), text)
        text = _IN_QUERY.sub(lambda match: match.group(1) + self._hash(match.group(2)), text)
        text = _BEARER.sub(lambda match: match.group(1) + self._hash(match.group(2)), text)
        return self._named(text)

    def _named(self, text: str) -> str:
        """Take out what follows the name of a secret: ``--api-key x``, ``api_key=x``, ``password: x``."""
        found, at = [], 0
        for match in _NAME.finditer(text):
            name, between = match.groups()
            spoken = not name.startswith("-") and not between.strip()  # "the token is lost" is prose
            value = None if spoken or not is_secret_name(name) else _VALUE.match(text, match.end())
            if value is None or match.start() < at or value.group().startswith(("-", _MARK)):
                continue
            if not name.lower().endswith("token") or _like_a_token(value.group()):
                found += [text[at : match.end()], self._hash(value.group())]
                at = value.end()
        return "".join([*found, text[at:]])

    def _hash(self, secret: str) -> str:
        if secret.startswith(_MARK):
            return secret
        if secret not in self._hashed:
            self._hashed[secret] = redacted(secret) if len(self._hashed) < _MOST else f"{_MARK}>"
        return self._hashed[secret]


def _like_a_token(item: Any) -> bool:
    """Tell a credential from an entry of a vocabulary: ``</s>``, ``<|endoftext|>``, ``[PAD]``, 151655."""
    return isinstance(item, str) and len(item) >= 8 and not item.startswith(("<", "["))
