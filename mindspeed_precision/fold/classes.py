"""Which ranks stand for which: the first of each class, as many classes as memory holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_precision.fold.ranges import PieceOutcome
from mindspeed_precision.fold.scan import ColumnOutcome, RankOutcome
from mindspeed_precision.records import RankCoordinates

_INFINITY = (1 << 62, 1 << 62)


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The choice.

    Attributes:
        stands_for: by rank that is kept, all ranks that it stands for, itself first.
        ranges: by rank and parameter, all ranks for whose ranges of the parameter the rank's stand.
        left: ranks that no kept one stands for: memory does not hold them.
        left_ranges: ranges, by rank and parameter, for which none stand.
        divided: ranks of which ranges stand, or are stood for, apart from all else.
    """

    stands_for: Mapping[int, tuple[int, ...]]
    ranges: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    left_ranges: frozenset[tuple[int, str]] = frozenset()
    divided: frozenset[int] = frozenset()


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
    return _chosen(groups, _ranges(rank for found in columns for rank in found.ranks), most)


@dataclass(eq=False)
class _Ranges:
    """Ranges of a parameter that show the same, on several ranks."""

    first: PieceOutcome
    ranks: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Records that are kept of them."""
        return self.first.pairs or self.first.alone


def _ranges(ranks: Iterable[RankOutcome]) -> list[_Ranges]:
    """Return the ranges that show the same: those that differ first come first."""
    found: dict[tuple[object, ...], _Ranges] = {}
    for rank in sorted(ranks, key=lambda one: one.rank):
        where = _where(rank)
        for piece in rank.ranges:
            own = where.pp_rank, where.tp_rank if piece.linked else 0, piece.fqn, piece.pattern
            found.setdefault(own, _Ranges(piece)).ranks.append(rank.rank)
    return sorted(found.values(), key=lambda one: (one.first.place or _INFINITY, one.ranks[0]))


def _groups(alike: Sequence[Sequence[_Column]]) -> Iterable[list[_Column]]:
    """Return the pipelines of equal replicas that show the same, those of the first replica first."""
    found: dict[bytes, list[_Column]] = {}
    for replica in alike:
        for column in replica:
            found.setdefault(column.pattern, []).append(column)
    return found.values()


def _chosen(groups: Iterable[list[_Column]], ranges: Iterable[_Ranges], most: int) -> Classes:
    stands_for: dict[int, tuple[int, ...]] = {}
    left: list[int] = []
    room = most
    differs = False
    begun: set[int] = set()  # ranks of the class that is kept in any case
    for group in sorted(groups, key=lambda group: _first_place(group[0])):
        size = sum(rank.pairs or _records(rank) for rank in group[0].ranks)
        first = not differs and any(rank.differing for rank in group[0].ranks)  # it is what is asked for
        differs = differs or first
        if size > room and stands_for and not first:
            left += [rank.rank for column in group for rank in column.ranks]
            continue
        room -= size
        begun = begun or {rank.rank for rank in group[0].ranks}
        for stage, kept in enumerate(group[0].ranks):
            stands_for[kept.rank] = tuple(sorted(column.ranks[stage].rank for column in group))
    of_ranges = list(ranges)
    held = _held(of_ranges, begun, room, differs=differs)
    chosen = set(held)
    return Classes(
        stands_for=dict(sorted(stands_for.items())),
        ranges={(one.ranks[0], one.first.fqn): tuple(one.ranks) for one in held},
        left=tuple(sorted(left)),
        left_ranges=frozenset(
            (rank, one.first.fqn) for one in of_ranges if one not in chosen for rank in one.ranks
        ),
        divided=frozenset(rank for one in of_ranges for rank in one.ranks),
    )


def _held(ranges: Iterable[_Ranges], begun: set[int], room: int, *, differs: bool) -> list[_Ranges]:
    """Return the ranges that are kept: those of some ranks, and the first that differ, in any case."""
    held = []
    for one in ranges:
        first = not differs and one.first.differing > 0
        if one.size <= room or first or not begun.isdisjoint(one.ranks):
            room -= one.size
            differs = differs or first
            held.append(one)
    return held


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
