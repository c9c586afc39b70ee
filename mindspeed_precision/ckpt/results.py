"""What was found about each parameter: the answer of ``ckpt``, before it becomes findings and lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mindspeed_precision.ckpt.difference import PADDED, RESHAPED, Told, tell
from mindspeed_precision.ckpt.pairing import (
    Matched,
    Named,
    matched,
    original,
    shared_geometry,
    tied,
)
from mindspeed_precision.ckpt.stored import Geometry, Stored
from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.records import Side
from mindspeed_precision.verify.pair.weight_pairs import Way

_LAYER = re.compile(r"((?:decoder|encoder|mtp)\.layers\.\d+)\.")


class Outcome(str, Enum):
    """What is said of one parameter."""

    IDENTICAL = "identical"
    SAME_AFTER = "same after"
    DIFFERS = "differs"
    OTHER_SHAPE = "other shape"
    MISSING = "missing"
    EXTRA = "extra"
    NOT_READ = "not read"


_WORST = (
    Outcome.NOT_READ,
    Outcome.OTHER_SHAPE,
    Outcome.MISSING,
    Outcome.EXTRA,
    Outcome.DIFFERS,
    Outcome.SAME_AFTER,
    Outcome.IDENTICAL,
)
TIED = "tied"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One parameter of two checkpoints.

    Attributes:
        pair: the two tensors.
        outcome: what is said of them.
        told: how they differ; None where one is missing or could not be read.
        detail: in one phrase.
    """

    pair: Matched
    outcome: Outcome
    told: Told | None = None
    detail: str = ""

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.pair.name

    @property
    def layer(self) -> str:
        """The layer that it belongs to; of what is in none, its module."""
        found = _LAYER.match(self.name)
        return found.group(1) if found else self.name.rpartition(".")[0] or self.name

    @property
    def steps(self) -> Mapping[Any, str]:
        """What makes the two the same."""
        return self.told.steps if self.told else {}

    @property
    def metrics(self) -> Mapping[str, float | int]:
        """How far they are apart."""
        return self.told.metrics if self.told else {}

    @property
    def badness(self) -> tuple[int, float]:
        """Order of the table: the worst first."""
        return _WORST.index(self.outcome), -float(self.metrics.get("rel_frobenius", 0.0))

    def plain(self) -> dict[str, Any]:
        """Return it for machines."""
        one, two = self.pair.one, self.pair.two
        return {
            "name": self.name,
            "role": self.pair.role,
            "outcome": self.outcome.value,
            "steps": {getattr(way, "value", way): words for way, words in self.steps.items()},
            "detail": self.detail,
            "metrics": dict(self.metrics),
            "rows": list(self.told.rows[:64]) if self.told else [],
            "baseline": _described(one),
            "candidate": _described(two),
        }


def _described(tensor: Stored | None) -> dict[str, Any] | None:
    if tensor is None:
        return None
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "source": tensor.source,
    }


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Two checkpoints, compared.

    Attributes:
        one: the baseline.
        two: the candidate.
        results: of every parameter and of what the optimizer keeps.
        geometry: of the heads.
    """

    one: Named
    two: Named
    results: tuple[Result, ...]
    geometry: Geometry = field(default_factory=Geometry)

    def of_role(self, *, parameters: bool) -> list[Result]:
        """Return the parameters, or what the optimizer keeps."""
        return [one for one in self.results if (one.pair.role == "param") is parameters]

    @property
    def same_weights(self) -> bool:
        """Whether every parameter is in both and the same, if only after a conversion."""
        found = self.of_role(parameters=True)
        return bool(found) and all(one.outcome in (Outcome.IDENTICAL, Outcome.SAME_AFTER) for one in found)

    @property
    def sharded(self) -> bool:
        """Whether a side is of several ranks' files, each with copies of its own."""
        return any(side.checkpoint.ranks > 1 for side in (self.one, self.two))

    @property
    def related(self) -> bool:
        """Whether both come from frameworks that order rows as Megatron or Hugging Face do."""
        return "mindspore" not in (self.one.checkpoint.family, self.two.checkpoint.family)


def compared(one: Named, two: Named) -> Compared:
    """Compare two checkpoints, tensor by tensor."""
    geometry = shared_geometry(one, two)
    results = tuple(_result(pair, one, two, geometry) for pair in _in_order(one, two))
    return Compared(one=one, two=two, results=results, geometry=geometry)


def _in_order(one: Named, two: Named) -> Iterator[Matched]:
    yield from matched(one, two)


def _result(pair: Matched, one: Named, two: Named, geometry: Geometry) -> Result:
    if pair.failed:
        return Result(pair=pair, outcome=Outcome.NOT_READ, detail=pair.note)
    side = tied(pair, one, two)
    if side is not None:
        copy = _copy(pair, one if side is Side.CANDIDATE else two, side, geometry)
        if copy is not None:
            return copy
    if pair.one is None or pair.two is None:
        outcome = Outcome.EXTRA if pair.one is None else Outcome.MISSING
        where = f"only in the {'candidate' if pair.one is None else 'baseline'}"
        held = pair.two if pair.one is None else pair.one
        assert held is not None
        own = f", there called {held.name}" if held.name != pair.name else ""
        return Result(pair=pair, outcome=outcome, detail=f"{where}{own}, {held.dtype}{list(held.shape)}")
    try:
        told = tell(pair.name, pair.one, pair.two, geometry=geometry)
    except PrecisionError as error:
        return Result(pair=pair, outcome=Outcome.NOT_READ, detail=str(error))
    return Result(pair=pair, outcome=_outcome(told), told=told, detail=_detail(pair, told))


def _copy(pair: Matched, holder: Named, side: Side, geometry: Geometry) -> Result | None:
    """Return what is said of a parameter that is another one of its checkpoint once more."""
    first, copy = original(holder, pair), pair.one or pair.two
    assert copy is not None
    if first is None or first.shape != copy.shape:
        return None
    told = tell(pair.name, first, copy, geometry=geometry)
    if not told.same or told.steps:
        return None
    what = "word embeddings" if "embed" in first.name else "output layer"
    words = f"a copy of the {what}, which the {side.value} has once"
    return Result(
        pair=pair, outcome=Outcome.SAME_AFTER, told=Told(way=Way.SAME, steps={TIED: words}), detail=words
    )


def _outcome(told: Told) -> Outcome:
    if told.way is Way.SHAPE:
        return Outcome.OTHER_SHAPE
    if not told.same:
        return Outcome.DIFFERS
    return Outcome.SAME_AFTER if told.steps else Outcome.IDENTICAL


def _detail(pair: Matched, told: Told) -> str:
    words = [f"{WORDS.get(way, getattr(way, 'value', way))}: {text}" for way, text in told.steps.items()]
    return "; ".join([*words, *([told.detail] if told.detail else []), *([pair.note] if pair.note else [])])


WORDS = {
    Way.CAST: "cast",
    Way.TRANSPOSED: "transposed",
    Way.PERMUTED: "permuted",
    Way.SCALED: "scaled",
    PADDED: "padding left out",
    RESHAPED: "reshaped",
    TIED: "tied",
}
"""What each step is called."""

__all__ = ["TIED", "WORDS", "Compared", "Outcome", "Result", "compared"]
