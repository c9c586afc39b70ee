"""Numbers of things in a sentence: ``1 record differs``, ``2 records differ``."""

from __future__ import annotations

_VERBS = {"are": "is", "were": "was", "have": "has", "do": "does", "go": "goes"}
_HISSING = ("s", "x", "z", "ch", "sh")


def count(number: int, noun: str, verb: str = "") -> str:
    """Write a number of things, and what they do.

    Args:
        number: how many; written with a space between thousands.
        noun: one of them (``record``, ``lost batch``).
        verb: what several of them do (``differ``, ``are``); empty for nothing.
    """
    one = number == 1
    thing = noun if one else plural(noun)
    does = agree(number, verb) if verb else ""
    return " ".join(filter(None, (f"{number:,}".replace(",", " "), thing, does)))


def agree(number: int, verb: str) -> str:
    """Return what so many do, of a verb that several do."""
    return _VERBS.get(verb, f"{verb}s") if number == 1 else verb


def plural(noun: str) -> str:
    """Return several of a thing."""
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(_HISSING) else f"{noun}s"


def singular(things: str) -> str:
    """Return one of what is named in the plural: ``tensors of the optimizer``, ``fused products``."""
    if any(f" {word} " in things for word in ("and", "x")):
        return things
    for word in (" of ", " with "):
        if word in things:
            head, _, tail = things.partition(word)
            return f"{singular(head)}{word}{tail}"
    if things.endswith(("ches", "shes", "sses", "xes", "iases")):
        return things.removesuffix("es")
    return f"{things[:-3]}y" if things.endswith("ies") else things.removesuffix("s")


__all__ = ["agree", "count", "plural", "singular"]
