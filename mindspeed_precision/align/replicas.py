"""The copies of a tensor that ranks of one run hold: found by placement, as two layouts are merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_precision.align.groups import Groups
from mindspeed_precision.align.lanes import Experts, Lanes, layout_of
from mindspeed_precision.align.stages import Stages
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.records import Phase, ReplicasDiffer

_LOOK = "look at what should keep them equal: the"
_REDUCTION = f"{_LOOK} reduction of this gradient over the tensor-parallel, data-parallel or embedding group"
_FORWARD = f"{_LOOK} all-reduce over the tensor-parallel group that makes this tensor, or the one before it"
_START = "load or broadcast the parameters before the first step, from one rank"
_KEPT_EQUAL_BY = {Phase.FPROP: _FORWARD, Phase.DGRAD: _FORWARD, Phase.INIT: _START}


def kept_equal_by(phase: Phase) -> str:
    """Return where to look if copies differ that were first seen so in a phase."""
    return _KEPT_EQUAL_BY.get(phase, _REDUCTION)


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """What the ranks of a run hold alike.

    Attributes:
        compared: how many tensors have copies on several ranks.
        differing: those whose copies are none, in execution order.
        order: of the first of them in the execution of the whole model; empty for none.
    """

    compared: int
    differing: tuple[ReplicasDiffer, ...]
    order: tuple[object, ...] = ()


def replicas_of(run: Run) -> Replicas:
    """Compare the copies that ranks of one run hold of parameters, gradients, states and activations.

    Copies are told by where each rank says that its tensor sits (``records.Placement``): over the
    tensor-parallel group in each lane of tokens, over the data-parallel group of what is reduced, and over
    the pipeline stages of a tied embedding. What has no placement is not compared.

    Args:
        run: as recorded; its steps are those of each rank.
    """
    experts = _experts(layout_of(run))
    spanning = Stages(run).spanning()
    groups = Groups(run, lanes=Lanes.TOKENS, experts=experts, spanning=spanning, numbering=None)
    for number, rank in run.ranks.items():
        groups.add(number, rank)
    groups.compare_copies()
    return Replicas(compared=groups.compared, differing=tuple(groups.replicas), order=groups.first_difference)


def _experts(layout: Mapping[str, object]) -> Experts:
    """Return what of an expert belongs to one lane: its sums, where its tokens are those of one lane."""
    if layout["etp_size"] is None:
        return Experts.MODULES  # there are none
    sizes = [layout[name] for name in ("ep_size", "etp_size", "tp_size")]
    ep, etp, tp = (size if isinstance(size, int) else 1 for size in sizes)
    return Experts.SUMS if ep * etp == tp else Experts.REDUCED
