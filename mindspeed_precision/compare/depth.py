"""How much rounding a record has behind it: the layers that it passed, the length of what was summed.

A sum of n products is off by at most γ_n = n u / (1 - n u) of the sum of their magnitudes (N. J. Higham,
*Accuracy and Stability of Numerical Algorithms*, 2nd ed. 2002, section 3.1), and by about √n u where
roundings are independent (Higham and T. Mary, *A new approach to probabilistic rounding error analysis*,
SIAM J. Sci. Comput. 41(5), 2019). Each layer adds errors of its own; independent ones add up as squares, so
that D layers give √D of one. A bound in units of that is

    rounding · ρ,   ρ = (u + u_s √n) √(1 + D)

with u the unit roundoff of the dtype that the model computes in, u_s of the one that it sums in (float32 for
types of 16 bits), n the longest sum before the record and D the number of layers that it passed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.elements import UNIT_ROUNDOFF
from mindspeed_precision.records import ParameterDeclaration, Phase, RecordKey, Role

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_FORWARD = frozenset({Role.INPUT, Role.OUTPUT, Role.LOSS})
_SUM_OF_TOKENS = frozenset({Phase.WGRAD, Phase.ACCUMULATE, Phase.REDUCE, Phase.CLIP, Phase.OPTIMIZER})


def numbered(fqn: str) -> tuple[str, int] | None:
    """Split a canonical name at its first number: ``("decoder.layers", 3)``; None where it has none."""
    found = _NUMBER.search(fqn)
    return (fqn[: found.start()].rstrip("."), int(found.group())) if found else None


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The layers of a model, in the order of execution, and the lengths of its sums.

    Attributes:
        offsets: by the name of a stack of layers, the number of layers of the stacks before it.
        layers: number of layers of all stacks.
        before: parameters that come before the first layer (embeddings).
        others: parameters outside the layers that come after some.
        forward: longest sum of a GEMM of the forward pass (columns of a weight).
        backward: the same of either pass (rows of a weight as well: the vocabulary, of an output layer).
        tokens: tokens that a gradient is summed over in a step.
        dtype: that the model computes in; empty where it is not known.
    """

    offsets: dict[str, int]
    layers: int
    before: frozenset[str]
    others: frozenset[str]
    forward: int
    backward: int
    tokens: int
    dtype: str

    def position(self, fqn: str) -> int:
        """Return the number of layers up to and including the one that a name is in; all after the last."""
        found = numbered(fqn)
        if found is not None and found[0] in self.offsets:
            return self.offsets[found[0]] + found[1] + 1
        early = _within(fqn, self.before) and not _within(fqn, self.others)
        around = any(_inside(stack, fqn) for stack in self.offsets)  # the decoder, the model
        return 0 if early and fqn and not around else self.layers

    def passed(self, key: RecordKey) -> int:
        """Return D: the layers that a record has passed, forward and, for gradients, backward again."""
        place = self.position(key.fqn)
        if key.role in _FORWARD:
            return place
        if key.role is Role.GRAD_NORM:
            return 2 * self.layers
        # back through the layers after it, and its own
        return self.layers + min(self.layers - place + 1, self.layers)

    def length(self, key: RecordKey) -> int:
        """Return n: the longest sum before a record."""
        if key.role in _FORWARD:
            return self.forward
        summed = self.tokens if key.phase in _SUM_OF_TOKENS else 0
        return max(self.forward, self.backward, summed)

    def unit(self, key: RecordKey, dtype: str) -> float:
        """Return ρ: what a bound's ``rounding`` is multiplied by.

        Args:
            key: of the record.
            dtype: of its elements; that of the model counts where it is known and coarser.
        """
        known = [UNIT_ROUNDOFF[name] for name in (dtype, self.dtype) if name in UNIT_ROUNDOFF]
        roundoff = max(known, default=0.0)
        sums = min(roundoff, UNIT_ROUNDOFF["float32"])
        return (roundoff + sums * math.sqrt(self.length(key))) * math.sqrt(1 + self.passed(key))


def _inside(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def _within(fqn: str, names: Iterable[str]) -> bool:
    """Tell whether a name is of one of these parameters, of a module around it, or beside it."""
    return any(_inside(name, fqn) or _inside(fqn, name.partition(".")[0]) for name in names)


def depth_of(run: Run, dtype: str) -> Depth:
    """Read the layers of a model from the parameters that a run declared, and lengths of sums from shapes.

    Args:
        run: the baseline, or its canonical run.
        dtype: that the model computes in.
    """
    sizes: dict[str, int] = {}
    before: set[str] = set()
    others: set[str] = set()
    for rank in run.ranks.values():
        early: set[str] = set()
        in_layers = False
        for parameter in rank.parameters:
            found = numbered(parameter.fqn)
            if found is not None:
                sizes[found[0]] = max(sizes.get(found[0], 0), found[1] + 1)
                before |= early
                early, in_layers = set(), True
            elif in_layers:
                others.add(parameter.fqn)
            else:
                early.add(parameter.fqn)
    offsets, layers = {}, 0
    for stack, size in sizes.items():
        offsets[stack] = layers
        layers += size
    shapes = [shape for rank in run.ranks.values() for shape in _matrices(rank.parameters)]
    return Depth(
        offsets=offsets,
        layers=layers,
        before=frozenset(before),
        others=frozenset(others),
        forward=max((columns for _, columns in shapes), default=1),
        backward=max((rows for rows, _ in shapes), default=1),
        tokens=max((_tokens(rank) for rank in run.ranks.values()), default=0),
        dtype=dtype,
    )


def _matrices(parameters: Iterable[ParameterDeclaration]) -> Iterator[tuple[int, int]]:
    for parameter in parameters:
        shape = parameter.shape if parameter.placement is None else parameter.placement.shape
        if len(shape) == 2:
            yield shape[0], shape[1]


def _tokens(rank: RankRecords) -> int:
    """Return the tokens of a step, in all microbatches and ranks: of the largest gradient of an output."""
    rows = (
        record.numel // record.shape[-1]
        for record in rank.records
        if record.key.role is Role.GRAD_OUTPUT and record.shape and record.shape[-1]
    )
    each = max(rows, default=0)
    return each * max(rank.microbatches.values(), default=1) * max(rank.coordinates.dp_size, 1)
