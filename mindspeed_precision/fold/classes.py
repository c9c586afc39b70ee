"""Which ranks stand for which: the first of each class, as many classes as memory holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_precision.fold.scan import ColumnOutcome, RankOutcome
from mindspeed_precision.records import RankCoordinates

_INFINITY = (1 << 62, 1 << 62)


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The choice.

    Attributes:
        stands_for: by rank that is kept, all ranks that it stands for, itself first.
        left: ranks that no kept one stands for: memory does not hold them.
    """

    stands_for: Mapping[int, tuple[int, ...]]
    left: tuple[int, ...] = ()


@dataclass
class _Column:
    """The stages of one pipeline."""

    ranks: tuple[RankOutcome, ...]
    pattern: bytes
    replica: int
    like: list[_Column] = field(default_factory=list)


def column_of(where: RankCoordinates) -> tuple[int, ...]:
    """Return what the stages of one pipeline have in common; ascending as the ranks are."""
    return replica_of(where), where.dp_rank, where.ep_rank, where.cp_rank, where.tp_rank


def replica_of(where: RankCoordinates) -> int:
    """Return which ranks explain each other's records in a microbatch, as ``diagnose.graph`` has it."""
    return where.dp_rank if where.ep_size == 1 else 0


def classes_of(columns: Sequence[ColumnOutcome], *, most: int) -> Classes:
    """Choose the ranks that are kept.

    Of data-parallel replicas that show the same, and in one replica of pipelines that show the same, the
    first is kept. What is explained within a replica is so explained by what is kept of it.

    Args:
        columns: every pipeline, by its first rank.
        most: records with a partner that may be kept; the classes that differ first come first, and the very
            first is kept in any case.
    """
    replicas: dict[int, list[_Column]] = {}
    for number, found in enumerate(columns):
        pattern = b"".join(rank.pattern for rank in found.ranks) + found.links
        if not all(rank.pattern for rank in found.ranks):
            pattern = number.to_bytes(8, "big")  # of its own kind
        replica = replica_of(_where(found.ranks[0]))
        replicas.setdefault(replica, []).append(_Column(found.ranks, pattern, replica))
    kinds: dict[tuple[bytes, ...], list[list[_Column]]] = {}
    for members in replicas.values():
        kinds.setdefault(tuple(column.pattern for column in members), []).append(members)
    groups = [group for alike in kinds.values() for group in _groups(alike)]
    return _chosen(groups, most)


def _groups(alike: Sequence[Sequence[_Column]]) -> Iterable[list[_Column]]:
    """Return the pipelines of equal replicas that show the same, those of the first replica first."""
    found: dict[bytes, list[_Column]] = {}
    for replica in alike:
        for column in replica:
            found.setdefault(column.pattern, []).append(column)
    return found.values()


def _chosen(groups: Iterable[list[_Column]], most: int) -> Classes:
    stands_for: dict[int, tuple[int, ...]] = {}
    left: list[int] = []
    room = most
    differs = False
    for group in sorted(groups, key=lambda group: _first_place(group[0])):
        size = sum(rank.pairs or _records(rank) for rank in group[0].ranks)
        first = not differs and any(rank.differing for rank in group[0].ranks)  # it is what is asked for
        differs = differs or first
        if size > room and stands_for and not first:
            left += [rank.rank for column in group for rank in column.ranks]
            continue
        room -= size
        for stage, kept in enumerate(group[0].ranks):
            stands_for[kept.rank] = tuple(sorted(column.ranks[stage].rank for column in group))
    return Classes(stands_for=dict(sorted(stands_for.items())), left=tuple(sorted(left)))


def _first_place(column: _Column) -> tuple[tuple[int, int], int]:
    """Order by where a pipeline differs first: what explains others must be kept."""
    place = min((rank.place for rank in column.ranks if rank.place is not None), default=_INFINITY)
    if not all(rank.pattern for rank in column.ranks):
        place = (-2, 0)  # nothing is known of it
    return place, column.ranks[0].rank


def _records(rank: RankOutcome) -> int:
    return max((side.records for side in rank.sides if side is not None), default=0)


def _where(rank: RankOutcome) -> RankCoordinates:
    side = next(side for side in rank.sides if side is not None)
    return side.coordinates
