"""All that the comparison of a rank can show, but for the bits themselves, as one digest.

Two ranks of one pattern give the same comparisons, the same explanations and the same findings: every rule
asks which records differ, which have the same bits as others, what is zero, not finite or did not move, and
what numbers the optimizer used. Where it asks more, more of the rank is put into the pattern: a pattern may
part ranks that are alike, never join what is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.compare import Policy, compare_pair
from mindspeed_precision.compare.policy import load_policy
from mindspeed_precision.diagnose.acceptance import HUAWEI, judge
from mindspeed_precision.dump.format import parse_statistics
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.fold.rank_lines import RankLines, Words
from mindspeed_precision.fold.templates import Matched, Positions, Template
from mindspeed_precision.records import Digest, Pair, Role, TensorRecord


@dataclass(frozen=True, kw_only=True)
class Sides:
    """One rank of both runs.

    Attributes:
        lines: as they were read, baseline first.
        templates: of both.
        matched: their records that have one key.
        static: what both declare: parameters, places, groups of the optimizer; in any bytes.
    """

    lines: tuple[RankLines, RankLines]
    templates: tuple[Template, Template]
    matched: Matched
    static: bytes


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a rank's comparison shows.

    Attributes:
        pattern: digest of it, without how its bits are those of other stages.
        differing: ``[differing, 2]`` fingerprints of the pairs that differ, in execution order.
        place: ``(step, seq)`` of the first of them; None for none.
        pairs: how many records have a partner.
        batches: by slot and step, the sums of the unordered fingerprints of both sides.
    """

    pattern: bytes
    differing: Words
    place: tuple[int, int] | None
    pairs: int
    batches: dict[tuple[str, int], tuple[int, int]]


def shown_by(sides: Sides, policy: Policy) -> Shown:
    """Compare one rank of both runs, column by column."""
    one, two = sides.lines
    at, other = sides.matched.one, sides.matched.two
    differ = one.first[at] != two.first[other]
    told = hashlib.blake2b(digest_size=16)
    told.update(one.template + two.template + sides.static)
    told.update(_bits(differ) + _bits(one.unordered[at] == two.unordered[other]))
    for lines, template in zip(sides.lines, sides.templates, strict=True):
        for part in _of_side(lines, template):
            told.update(part)
    positions = np.flatnonzero(differ)
    told.update(_judgements(sides, positions, policy))
    first = int(at[positions[0]]) if len(positions) else None
    return Shown(
        pattern=told.digest(),
        differing=np.stack([one.first[at[positions]], two.first[other[positions]]], axis=1),
        place=None if first is None else (sides.templates[0].keys[first].step, first),
        pairs=len(at),
        batches={
            of: (_sum(one, some), _sum(two, sides.templates[1].batches[of]))
            for of, some in sides.templates[0].batches.items()
            if of in sides.templates[1].batches
        },
    )


def labels(words: NDArray[np.uint64]) -> bytes:
    """Return which rows are equal, and nothing of what they are: each is given the number of the first."""
    if not len(words):
        return b""
    flat = np.ascontiguousarray(words)
    rows = flat.view([("", flat.dtype)] * flat.shape[1]).ravel() if flat.ndim == 2 else flat
    _, first, group = np.unique(rows, return_index=True, return_inverse=True)
    return np.asarray(first[group.ravel()], np.int64).tobytes()


def _of_side(lines: RankLines, template: Template) -> Iterable[bytes]:
    """Return what one run shows by itself."""
    known = lines.zeros >= 0
    yield _bits(lines.first == 0) + _bits(lines.unordered == 0)
    yield _bits(known) + _bits(lines.zeros == template.numels)
    yield _bits(lines.nans > 0) + _bits(lines.infs > 0)
    yield b"".join(lines.statistics[n] for n in template.numbers)
    yield labels(lines.first[template.products])
    still = lines.first[template.after] == lines.first[template.before]
    yield _bits(still)
    for update in np.flatnonzero(still).tolist():  # rounding may explain it
        yield b"".join(lines.statistics[n] for n in template.updates[update])
    where = lines.coordinates
    if max(where.dp_size, where.cp_size, where.ep_size) == 1:  # the ratio of two norms shows a factor
        yield b"".join(lines.statistics)


def _judgements(sides: Sides, positions: Positions, policy: Policy) -> bytes:
    """Return what the second policy says of single numbers that differ, and of what is not finite."""
    one, two = sides.lines
    at, other = sides.matched.one[positions], sides.matched.two[positions]
    nans = (one.nans[at] != two.nans[other]) & (two.nans[other] > 0)
    infs = (one.infs[at] != two.infs[other]) & (two.infs[other] > 0)
    single = (sides.templates[0].numels[at] == 1) & (sides.templates[1].numels[other] == 1)
    numbers = single & (one.zeros[at] >= 0) & (two.zeros[other] >= 0)
    said = []
    for n, m in zip(at[numbers], other[numbers], strict=True):
        if sides.templates[0].keys[n].role is Role.HYPERPARAMETER:
            continue  # the numbers themselves are in the pattern
        pair = Pair(rank=0, baseline=_record(sides, 0, int(n)), candidate=_record(sides, 1, int(m)))
        said.append(judge_number(pair, policy))
    return _bits(nans) + _bits(infs) + "".join(said).encode()


def judge_number(pair: Pair, policy: Policy) -> str:
    """Return what the acceptance criterion says of a pair of single numbers."""
    nothing = Run(path=Path(), manifest={}, ranks={})  # no elements were kept: nothing is read from it
    compared = compare_pair(pair, policy=policy, baseline=nothing, candidate=nothing)
    return judge(compared, _acceptance())[0].value


@cache
def _acceptance() -> Policy:
    return load_policy(HUAWEI)


def _record(sides: Sides, side: int, number: int) -> TensorRecord:
    """Return a record of a rank: the template's, with the rank's own digest."""
    lines, known = sides.lines[side], sides.templates[side].scalars[number]
    statistics = parse_statistics(lines.statistics[number], where=known.key.describe())
    digest = Digest(
        fingerprint=int(lines.first[number]),
        unordered=int(lines.unordered[number]),
        statistics=statistics,
    )
    return replace(known, digest=digest)


def _sum(lines: RankLines, positions: Positions) -> int:
    return int(lines.unordered[positions].sum(dtype=np.uint64))


def _bits(values: NDArray[np.bool_]) -> bytes:
    return np.packbits(values).tobytes()
