"""Which process groups a parallel layout has: all ranks that differ in some of their coordinates alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mindspeed_precision.records import RankCoordinates

_STAGE = "PP"
View = Mapping[int, Mapping[str, int]]
"""Coordinates by rank and name."""


class Flaw(Enum):
    """Why a group is none of the layout's."""

    STAGES = "ranks of several stages that sit in several places of them"
    PART = "some ranks of one of the layout's groups"
    MIXED = "some ranks of several of the layout's groups"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A layout as Megatron makes its groups of it.

    Attributes:
        dense: every rank's coordinates TP, CP, DP and PP.
        expert: every rank's ETP, EP, EDP and PP, of what experts are split by; empty where that is not known.
    """

    dense: View
    expert: View

    def judge(self, group: Sequence[int]) -> tuple[str, Flaw | None]:
        """Return what is wrong with a group, in words and by kind; empty and None where nothing is.

        One of the layout's: all ranks that agree in the coordinates in which the group agrees. Ranks of
        one place in their stages may be some of them: the stages that hold an embedding.
        """
        part = False
        for view in filter(None, (self.dense, self.expert)):
            varying, whole = _varying(view, group)
            if varying == {_STAGE} or (len(group) == whole and _STAGE not in varying):
                return "", None
            part = part or len(varying) == 1 or varying == {"CP", "DP"}
        varying, whole = _varying(self.dense, group)
        names = " x ".join(sorted(varying))
        if _STAGE in varying:
            return f"it crosses pipeline stages, along {names}", Flaw.STAGES
        return f"it has {len(group)} of {whole} ranks of {names}", Flaw.PART if part else Flaw.MIXED


def _varying(view: View, group: Sequence[int]) -> tuple[set[str], int]:
    """Return the coordinates in which members of a group differ, and how many ranks agree in the others."""
    first = view[group[0]]
    varying = {name for rank in group for name, value in view[rank].items() if value != first[name]}
    fixed = first.keys() - varying
    return varying, sum(all(where[name] == first[name] for name in fixed) for where in view.values())


def grid_of(ranks: Mapping[int, RankCoordinates], expert_tensor: int | None) -> Grid | str:
    """Return the layout of a run, or why it is not known.

    Args:
        ranks: coordinates of those that recorded.
        expert_tensor: tensor-parallel size of experts; None: not known.
    """
    one = next(iter(ranks.values()))
    missing = one.world_size - len(ranks)
    if missing:
        return f"places in the layout are not known: {missing} ranks did not record"
    dense = {
        number: {"TP": at.tp_rank, "CP": at.cp_rank, "DP": at.dp_rank, _STAGE: at.pp_rank}
        for number, at in ranks.items()
    }
    full = one.tp_size * one.cp_size * one.dp_size * one.pp_size == one.world_size
    if not full or len({tuple(at.values()) for at in dense.values()}) < len(dense):
        return "the ranks are no grid of TP x CP x DP x PP"
    return Grid(dense=dense, expert=dict(_experts(ranks, expert_tensor or one.tp_size)))


def _experts(ranks: Mapping[int, RankCoordinates], tensor: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield where ranks stand among the experts; nothing where that is not Megatron's order."""
    stages: dict[int, list[int]] = {}
    for number in sorted(ranks):
        stages.setdefault(ranks[number].pp_rank, []).append(number)
    found = []
    for stage, members in stages.items():
        for index, number in enumerate(members):
            rest, etp = divmod(index, tensor)
            edp, ep = divmod(rest, ranks[number].ep_size)
            if ep != ranks[number].ep_rank:
                return
            found.append((number, {"ETP": etp, "EP": ep, "EDP": edp, _STAGE: stage}))
    yield from found
