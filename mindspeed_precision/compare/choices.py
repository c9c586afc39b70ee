"""Whether each run gave its tokens to the experts that its own scores say.

The scores of a router are computed anew in float64 from what it received and its weight. They leave the
choice open where two are as near as their roundings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.record.elements import UNIT_ROUNDOFF, to_numbers
from mindspeed_precision.records import INIT_STEP, Pair, Phase, RecordKey, Role

_ROUTER = ".router"
_PARAMETERS = ("weight", "bias")
_SIDES = ("baseline", "candidate")
_OTHER_CHOICES = (
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_expert_capacity_factor",
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
)
"""Settings under which the largest scores alone do not decide."""

_MOST = 0.5
"""Share of tokens that rounding may turn where the choice cannot be computed anew."""

Rows = NDArray[np.bool_]
Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Flips:
    """A routing map of which the runs have other entries.

    Attributes:
        pair: the maps, ``[tokens, experts]`` bool.
        rows: tokens of other routes, ``[tokens]``; None: no elements were kept.
        wrong: what a run chose against its own scores, in words; empty: nothing.
        unknown: why the choice could not be computed anew; empty where it was.
    """

    pair: Pair
    rows: Rows | None
    wrong: str = ""
    unknown: str = ""

    @property
    def experts(self) -> str:
        """Name of the layer of experts."""
        return self.pair.key.fqn.removesuffix(_ROUTER)

    @property
    def layer(self) -> str:
        """Name of the layer around it."""
        return self.experts.rpartition(".")[0]

    @property
    def count(self) -> int:
        """Tokens that took another route; 0 where that is not known."""
        return 0 if self.rows is None else int(self.rows.sum())


class Choices:
    """The routing maps in which two runs differ.

    Args:
        baseline: its run, for elements.
        candidate: its run.
        pairs: every pair of the two.
    """

    def __init__(self, baseline: Run, candidate: Run, pairs: Sequence[Pair]) -> None:
        self._runs = (baseline, candidate)
        self._pairs = pairs

    @cached_property
    def flips(self) -> tuple[Flips, ...]:
        """Every routing map whose bits differ, in execution order."""
        found = (self._flips(pair) for pair in self._differing)
        return tuple(sorted(found, key=lambda one: (*moment(one.pair.key), one.pair.candidate.seq)))

    @cached_property
    def _differing(self) -> list[Pair]:
        maps = (pair for pair in self._pairs if is_routing_map(pair))
        return [pair for pair in maps if not pair.baseline.digest.same_bits(pair.candidate.digest)]

    @cached_property
    def _named(self) -> dict[tuple[int, RecordKey], Pair]:
        """The pairs of routers, of the layers around them, and of the routers' parameters."""
        routers = {pair.key.fqn for pair in self._differing}
        experts = {name.removesuffix(_ROUTER) for name in routers}
        wanted = routers | experts | {name.rpartition(".")[0] for name in experts}
        wanted |= {f"{name}.{kind}" for name in routers for kind in _PARAMETERS}
        return {(pair.rank, pair.key): pair for pair in self._pairs if pair.key.fqn in wanted}

    def beside(self, found: Flips, fqn: str, role: Role = Role.OUTPUT) -> Pair | None:
        """Return the first tensor that a module around a routing map received or gave; None: not recorded."""
        return self._named.get((found.pair.rank, replace(found.pair.key, fqn=fqn, role=role, slot="0")))

    def elements(self, pair: Pair | None) -> tuple[HostTensor, HostTensor] | None:
        """Return the elements of both sides; None where one side has none."""
        if pair is None or pair.baseline.payload is None or pair.candidate.payload is None:
            return None
        sides = zip(self._runs, (pair.baseline, pair.candidate), strict=True)
        one, two = (run.ranks[pair.rank].payload(record) for run, record in sides)
        return one, two

    def _flips(self, pair: Pair) -> Flips:
        maps = self.elements(pair)
        if maps is None:
            return Flips(pair=pair, rows=None, unknown="no elements of the routing map were kept")
        chosen = [to_numbers(side).astype(bool) for side in maps]
        rows = np.asarray((chosen[0] != chosen[1]).any(axis=1))
        if not any(self._config(side).get("moe_expert_capacity_factor") for side in (0, 1)):
            wrong = _other_number(*(one.sum(axis=1) for one in chosen))
            if wrong:
                return Flips(pair=pair, rows=rows, wrong=wrong)
        for side in (0, 1):
            scores = self._scores(pair, side)
            if isinstance(scores, str) and rows.sum() > _MOST * len(rows):
                turned = f"{rows.sum()} of {len(rows)} tokens take another route, more than rounding turns"
                return Flips(pair=pair, rows=rows, wrong=f"{turned} ({scores})")
            if isinstance(scores, str):
                return Flips(pair=pair, rows=rows, unknown=scores)
            wrong = _against(*scores, chosen[side], chosen[1 - side], rows)
            if wrong:
                return Flips(pair=pair, rows=rows, wrong=f"in the {_SIDES[side]} {wrong}")
        return Flips(pair=pair, rows=rows)

    def _scores(self, pair: Pair, side: int) -> tuple[Numbers, Numbers] | str:
        """Return the scores of every expert and what rounding may change in them, ``[tokens, experts]``."""
        config = self._config(side)
        other = [name for name in _OTHER_CHOICES if config.get(name)]
        if other or config.get("moe_router_load_balancing_type") == "sinkhorn":
            return f"the choice depends on {', '.join(other) or 'sinkhorn'}, too"
        if config.get("moe_router_enable_expert_bias"):
            return "the choice depends on expert_bias, which is not compared"
        given = self._given(pair, side)
        weight, bias = (self._parameter(pair.key, kind, side) for kind in _PARAMETERS)
        if given is None or weight is None:
            return "no elements of the router's input and weight were kept"
        dtype, inputs = given
        tokens, experts = pair.candidate.shape
        if weight.shape != (experts, inputs.shape[1]) or len(inputs) != tokens:
            return "the router's weight does not fit its input"
        logits = inputs @ weight.T + (0.0 if bias is None else bias)
        sizes = np.abs(inputs) @ np.abs(weight).T
        unit, sums = UNIT_ROUNDOFF.get(dtype, 0.0), UNIT_ROUNDOFF["float32"]
        return logits, 4 * (unit * np.abs(logits) + sums * math.sqrt(inputs.shape[1]) * sizes)

    def _config(self, side: int) -> Mapping[str, Any]:
        config = self._runs[side].manifest.get("config") or {}
        return config.get("transformer_config") or {}

    def _given(self, pair: Pair, side: int) -> tuple[str, Numbers] | None:
        """Return dtype and elements of what the router received, ``[tokens, hidden]``."""
        key = replace(pair.key, role=Role.INPUT, slot="0")
        elements = self.elements(self._named.get((pair.rank, key)))
        if elements is None:
            return None
        numbers = to_numbers(elements[side]).astype(np.float64)
        return elements[side].dtype, numbers.reshape(-1, numbers.shape[-1])

    def _parameter(self, key: RecordKey, kind: str, side: int) -> Numbers | None:
        """Return a parameter of the router as the step found it."""
        name = f"{key.fqn}.{kind}"
        of = (p for p in self._named.values() if p.key.fqn == name and p.key.role is Role.PARAM)
        last = max((p for p in of if p.key.step < key.step), key=lambda p: p.key.step, default=None)
        if last is None or last.key.step not in (key.step - 1, INIT_STEP):
            return None
        elements = self.elements(last)
        return None if elements is None else to_numbers(elements[side]).astype(np.float64)


def is_routing_map(pair: Pair) -> bool:
    """Tell whether a pair is of what a router gave to whom: ``[tokens, experts]`` bool."""
    key, record = pair.key, pair.candidate
    named = key.fqn.endswith(_ROUTER) and key.phase is Phase.FPROP and key.role is Role.OUTPUT
    return named and record.dtype == "bool" and len(record.shape) == 2 and pair.baseline.shape == record.shape


def _other_number(one: Counts, two: Counts) -> str:
    """Say which token is given to more or fewer experts, which no rounding does; empty: none."""
    token = next(iter(np.flatnonzero(one != two)), None)
    if token is None:
        return ""
    experts, before = (count(int(side[token]), "expert") for side in (two, one))
    return f"in the candidate token {token} is given to {experts}, in the baseline to {before}"


def _against(scores: Numbers, slack: Numbers, mine: Rows, other: Rows, rows: Rows) -> str:
    """Say which token was not given to the expert that its scores prefer; empty: none."""
    for token in np.flatnonzero(rows):
        only, missed = (
            np.flatnonzero(one[token] & ~two[token]) for one, two in ((mine, other), (other, mine))
        )
        for taken in only:
            for left in missed:
                room = slack[token, taken] + slack[token, left]
                if scores[token, taken] < scores[token, left] - room:
                    return (
                        f"token {token} goes to expert {taken}, although the router's input and weight give "
                        f"expert {left} the larger score ({scores[token, left]:.6g}, not "
                        f"{scores[token, taken]:.6g})"
                    )
    return ""


def moment(key: RecordKey) -> tuple[int, int]:
    """Return step and microbatch."""
    return key.step, key.microbatch
