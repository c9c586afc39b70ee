"""The numbers of a step, under the names that a dashboard shows them by (``docs/live.md`` lists them).

They are the statistics that were recorded anyway: nothing is computed on a device. Norms are of what one rank
holds; several ranks are several runs of the dashboard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_precision.records import NO_MICROBATCH, Phase, RecordKey, Role, TensorRecord

_TEXT = re.compile(r'"mean":"?([^",]+)"?,"l2_norm":"?([^",]+)"?,"zeros":\d+,"nans":(\d+),"infs":(\d+)')

_STATE = {Role.PARAM: "param", Role.EXP_AVG: "exp_avg", Role.EXP_AVG_SQ: "exp_avg_sq"}
_GRADIENTS = (
    (Phase.REDUCE, Role.REDUCED_GRAD, ""),
    (Phase.ACCUMULATE, Role.MAIN_GRAD, "after"),
    (Phase.WGRAD, Role.WGRAD, ""),
    (Phase.WGRAD, Role.BGRAD, ""),
)
"""Where the gradient of a parameter is found, best first; each is the last of its step."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A record of a step, as far as its statistics go.

    Attributes:
        key: of the record.
        mean: of its finite elements; of a single number the number, NaN and infinities included.
        l2_norm: of its finite elements.
        nans: how many.
        infs: how many.
    """

    key: RecordKey
    mean: float
    l2_norm: float
    nans: int
    infs: int


def seen_of(record: TensorRecord) -> Seen | None:
    """Return what a record that was read says; None: it has no statistics."""
    statistics = record.digest.statistics
    if statistics is None:
        return None
    value = record.value
    return Seen(
        key=record.key,
        mean=statistics.mean if value is None else value,
        l2_norm=statistics.l2_norm,
        nans=statistics.nans,
        infs=statistics.infs,
    )


def seen_of_text(key: RecordKey, digest: str) -> Seen | None:
    """Return what a record that is being written says, from the text of its digest; None: no statistics."""
    found = _TEXT.search(digest)
    if found is None:
        return None
    mean, norm, nans, infs = found.groups()
    return Seen(key=key, mean=float(mean), l2_norm=float(norm), nans=int(nans), infs=int(infs))


class StepValues:
    """Collects the records of one step, and returns its numbers by tag."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._losses: list[float] = []
        self._rates: list[float] = []
        self._gradients: dict[str, tuple[int, float]] = {}
        self._outputs: dict[str, float] = {}
        self._nans = self._infs = 0
        self._any = False

    def add(self, seen: Seen) -> None:
        """Take a record."""
        key = seen.key
        self._any = True
        if not (key.role in (Role.INPUT, Role.BATCH) and "mask" in key.slot):  # masks are infinite on purpose
            self._nans += seen.nans
            self._infs += seen.infs
        if key.role is Role.LOSS:
            self._loss(seen)
        elif key.role is Role.GRAD_NORM and not key.slot:
            self._values["grad_norm"] = _number(seen)
        elif key.role is Role.HYPERPARAMETER and key.slot == "lr":
            self._rates.append(seen.mean)
        elif key.role in _STATE and key.phase is Phase.OPTIMIZER:
            self._values[f"{_STATE[key.role]}/{key.fqn}"] = seen.l2_norm
        elif key.role is Role.OUTPUT and key.phase is Phase.FPROP and not key.recomputed:
            self._outputs[key.fqn] = math.hypot(self._outputs.get(key.fqn, 0.0), seen.l2_norm)
        else:
            self._gradient(seen)

    def _loss(self, seen: Seen) -> None:
        if seen.key.microbatch == NO_MICROBATCH:
            self._values[f"loss/{seen.key.slot or 'loss'}"] = _number(seen)
        elif not seen.key.slot:
            self._losses.append(_number(seen))

    def _gradient(self, seen: Seen) -> None:
        key = seen.key
        for rank, wanted in enumerate(_GRADIENTS):
            if (key.phase, key.role, key.slot) == wanted:
                known = self._gradients.get(key.fqn)
                if known is None or rank <= known[0]:
                    self._gradients[key.fqn] = (rank, seen.l2_norm)

    def values(self) -> Mapping[str, float]:
        """Return the numbers by tag; empty where nothing had statistics."""
        if not self._any:
            return {}
        found = dict(self._values)
        if self._losses and not any(tag.startswith("loss/") for tag in found):
            found["loss/microbatch mean"] = math.fsum(self._losses) / len(self._losses)
        if self._rates:
            found["learning_rate"] = max(self._rates)
            if min(self._rates) != max(self._rates):
                found["learning_rate_min"] = min(self._rates)
        found |= {f"dW/{fqn}": norm for fqn, (_, norm) in self._gradients.items()}
        found |= {f"output/{fqn or '(model)'}": norm for fqn, norm in self._outputs.items()}
        return found | {"nonfinite/nans": float(self._nans), "nonfinite/infs": float(self._infs)}


def _number(seen: Seen) -> float:
    return math.nan if seen.nans else math.inf if seen.infs else seen.mean


__all__ = ["Seen", "StepValues", "seen_of", "seen_of_text"]
