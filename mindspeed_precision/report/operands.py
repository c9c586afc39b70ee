"""The operands of a divergent GEMM, and how they lie in memory on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_precision.records import Comparison, Diagnosis, Origin, Pair, Phase, Role

MOST_GEMMS = 12

_OPERANDS = (Role.GRAD_OUTPUT, Role.INPUT, Role.WGRAD)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A product that is an origin, with what it was computed from.

    Attributes:
        origin: dW.
        operands: ``grad_output``, ``input`` and dW itself, where they were recorded.
    """

    origin: Origin
    operands: tuple[Comparison, ...]


def divergent_gemms(diagnosis: Diagnosis) -> tuple[Gemm, ...]:
    """Return the origins that are dW at a GEMM, first one first, with their operands."""
    origins = [o for o in diagnosis.origins if o.key.phase is Phase.WGRAD and o.key.role is Role.WGRAD]
    if not origins:
        return ()
    wanted = {(o.key.step, o.key.microbatch, _module(o.key.fqn), o.ranks[0]) for o in origins[:MOST_GEMMS]}
    found: dict[tuple[int, int, str, int], dict[Role, Comparison]] = {}
    for place, comparison in _of_gemms(diagnosis):
        if place in wanted:
            found.setdefault(place, {}).setdefault(comparison.key.role, comparison)
    gemms = []
    for origin in origins[:MOST_GEMMS]:
        key = origin.key
        known = found.get((key.step, key.microbatch, _module(key.fqn), origin.ranks[0]), {})
        gemms.append(Gemm(origin=origin, operands=tuple(known[r] for r in _OPERANDS if r in known)))
    return tuple(gemms)


def _module(fqn: str) -> str:
    return fqn.removesuffix(".weight")


def _of_gemms(diagnosis: Diagnosis) -> Iterator[tuple[tuple[int, int, str, int], Comparison]]:
    for comparison in diagnosis.comparisons:
        key, pair = comparison.key, comparison.pair
        if key.phase is Phase.WGRAD and key.role in _OPERANDS and isinstance(pair, Pair):
            yield (key.step, key.microbatch, _module(key.fqn), pair.rank), comparison
