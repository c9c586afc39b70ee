"""Tokens that rounding sends to another expert: the choice of a router is not continuous.

A router gives a token to the k experts of the largest scores. Where two of these are as good as equal, a
rounding in what the router receives decides, and what the token becomes differs by as much as two experts do.
No bound on rounding covers that. It is still no fault if each run chose what its own scores say, which is
computed anew in float64 from the router's own input and weight: then what differs is the input, and that is
judged where it was made.

What such a token changes is measured where it leaves its layer, on its rows alone: all other rows are judged
as ever. What is computed from that layer on, in this microbatch and backward, may be off by ``FACTOR`` times
that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from mindspeed_precision.compare.choices import Choices, Flips, Rows, moment
from mindspeed_precision.compare.depth import Depth
from mindspeed_precision.compare.metrics import Metrics, element_metrics
from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import NO_MICROBATCH, Comparison, Pair, Phase, Role, Verdict

FACTOR = 4.0
"""Largest error behind a flipped token, in units of what it changes in its layer: as calibration allows."""

REROUTED = "rerouted"
"""Metric: tokens that took another route by rounding, of a record that cannot be compared therefore."""

_MODULES = frozenset({Phase.FPROP, Phase.DGRAD, Phase.WGRAD, Phase.ACCUMULATE})
_STATES = frozenset({Phase.CLIP, Phase.OPTIMIZER})
"""Phases in which what flipped in earlier steps of one optimizer state is still there."""

_MEASURED = {
    "rel_frobenius": "rel_frobenius",
    "max_ratio": "max_ratio",
    "worst_rows_ratio": "worst_rows_ratio",
    "norm_change": "rel_frobenius",
    "extreme_change": "max_ratio",
    "sketch_low": "rel_frobenius",
    "update_share": "rel_frobenius",
    "norm_update_share": "rel_frobenius",
    "sketch_update_least": "rel_frobenius",
}
"""By bound, what is measured of the flipped rows."""


class Routes:
    """The routing maps of two runs that differ, and what follows from them.

    Args:
        baseline: its run, for elements.
        candidate: its run.
        pairs: every pair of the two.
        depth: the layers of the model.
        tolerated: tells whether a pair is within tolerance: routes that a fault turned excuse nothing.
    """

    def __init__(
        self,
        baseline: Run,
        candidate: Run,
        pairs: Sequence[Pair],
        *,
        depth: Depth,
        tolerated: Callable[[Pair], bool],
    ) -> None:
        self._choices = Choices(baseline, candidate, pairs)
        self._depth = depth
        self._tolerated = tolerated
        self._explained: list[Flips] = []
        self._judged = False

    def _explain(self) -> list[Flips]:
        """Return the flips that rounding explains; one may excuse what the router of a later one receives."""
        if not self._judged:
            self._judged = True
            for found in self._choices.flips:
                given = self._choices.beside(found, found.pair.key.fqn, Role.INPUT)
                sound = given is None or self._tolerated(given)
                if found.rows is not None and not found.wrong and sound:
                    self._explained.append(found)
        return self._explained

    def of_map(self, pair: Pair) -> Flips | None:
        """Return what is known of a routing map; None: it is none, or what was wrong before it turned it."""
        found = next((found for found in self._choices.flips if found.pair is pair), None)
        sound = found is None or found.wrong or found.rows is None or found in self._explain()
        return found if sound else None

    def rows(self, pair: Pair) -> Rows | None:
        """Return the tokens that went elsewhere, of the output of a router or of a layer around it."""
        return next((found.rows for found in self._explain() if self._set_aside(found, pair)), None)

    def _set_aside(self, found: Flips, pair: Pair) -> bool:
        """Tell whether the rows of what flipped are left out of a record, which is judged without them."""
        key, origin = pair.key, found.pair.key
        same = replace(origin, fqn=key.fqn, slot="0") == key and found.pair.rank == pair.rank
        return same and key.fqn in (origin.fqn, found.experts, found.layer)

    def rerouted(self, pair: Pair) -> Flips | None:
        """Return why experts were given other tokens, of a record inside them; None: for no such reason."""
        key = pair.key
        return next(
            (
                found
                for found in self._explain()
                if key.phase in _MODULES
                and key.fqn.startswith(f"{found.experts}.")
                and not key.fqn.startswith(found.pair.key.fqn)
                and key.role not in (Role.WGRAD, Role.BGRAD, Role.MAIN_GRAD)
                and moment(key) == moment(found.pair.key)
            ),
            None,
        )

    def allowance(self, pair: Pair, metric: str) -> float:
        """Return by how much a bound is wider because of tokens that took another route before the record."""
        measured = _MEASURED.get(metric)
        if measured is None or not self._explain():
            return 0.0
        by_moment: dict[tuple[int, int], float] = defaultdict(float)
        for found in self._explain():
            if self._reaches(found, pair) and not self._set_aside(found, pair):
                inside = pair.key.fqn == found.layer or pair.key.fqn.startswith(f"{found.layer}.")
                where = found.experts if inside else found.layer
                by_moment[moment(found.pair.key)] += self._change(found, where).get(measured, 0.0) ** 2
        return FACTOR * math.sqrt(max(by_moment.values(), default=0.0))

    def _reaches(self, found: Flips, pair: Pair) -> bool:
        """Tell whether a record was computed from what flipped."""
        key, origin = pair.key, found.pair.key
        if key.step != origin.step:
            return key.step > origin.step and key.phase in _STATES
        if key.microbatch not in (NO_MICROBATCH, origin.microbatch):
            return key.phase is Phase.ACCUMULATE and key.microbatch > origin.microbatch
        if key.phase is not Phase.FPROP:
            return key.phase not in (Phase.INIT, Phase.BATCH)
        one, two = self._depth.position(origin.fqn), self._depth.position(key.fqn)
        if one == two and pair.rank == found.pair.rank:
            return pair.candidate.seq > found.pair.candidate.seq
        return two >= one

    def _change(self, found: Flips, fqn: str) -> Metrics:
        """Return the errors of a module's output in the flipped rows alone, relative to the whole."""
        return self._changes.get((id(found), fqn), {})

    @cached_property
    def _changes(self) -> dict[tuple[int, str], Metrics]:
        found: dict[tuple[int, str], Metrics] = {}
        for flips in self._choices.flips:
            for fqn in (flips.experts, flips.layer):
                elements = self._choices.elements(self._choices.beside(flips, fqn))
                if elements is None or flips.rows is None:
                    continue
                one, two = elements
                mask = by_rows(flips.rows, one.bits.shape)
                if mask is not None:
                    moved = replace(two, bits=np.where(mask, two.bits, one.bits))
                    found[id(flips), fqn] = element_metrics(one, moved)
        return found

    def notes(self) -> Iterable[str]:
        """Say what took another route, and what that widens."""
        known = [found for found in self._explain() if not found.unknown]
        if known:
            tokens = count(sum(found.count for found in known), "token")
            first = known[0].pair.key
            yield (
                f"{tokens} took another route by rounding, in each run by its own scores (first: "
                f"{first.describe()}): these rows are left out in the output of their layer, and bounds "
                f"behind it are wider by {FACTOR:g} times what they change there"
            )
        for found in self._choices.flips:
            if found.unknown:
                yield f"{found.pair.key.describe()}: routes differ and are not judged: {found.unknown}"


def by_rows(rows: Rows, shape: Sequence[int]) -> Rows | None:
    """Return a mask of a tensor's elements, tokens before the last dimension; None: it has other rows."""
    if not shape or math.prod(shape[:-1]) != len(rows):
        return None
    return np.broadcast_to(rows.reshape(*shape[:-1], 1), tuple(shape))


def of_other_tokens(pair: Pair, tokens: int) -> Comparison:
    """Leave out what the experts of a layer made of other tokens: row n is not row n of the other side."""
    metrics: Metrics = {"bitwise": pair.baseline.digest.same_bits(pair.candidate.digest), REROUTED: tokens}
    if metrics["bitwise"]:
        return Comparison(pair=pair, verdict=Verdict.IDENTICAL, metrics=metrics)
    reason = f"experts got other tokens: {tokens} took another route by rounding"
    return Comparison(pair=pair, verdict=Verdict.INCOMPARABLE, metrics=metrics, reason=reason)


def of_map(pair: Pair, found: Flips, metrics: Metrics) -> Comparison:
    """Judge a routing map whose bits differ: each run must have chosen what its own scores say."""
    metrics = metrics | {REROUTED: found.count}
    verdict, reason = Verdict.WITHIN_TOLERANCE, f"{found.count} tokens, each by its own scores"
    if found.wrong:
        verdict, reason = Verdict.DIVERGED, found.wrong
    elif found.unknown:
        verdict, reason = Verdict.INCOMPARABLE, f"routes differ; {found.unknown}"
    return Comparison(pair=pair, verdict=verdict, metrics=metrics, reason=reason)
