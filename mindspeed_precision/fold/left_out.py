"""What is said of ranks, and of ranges, that memory does not hold."""

from __future__ import annotations

from mindspeed_precision.align.compatible import numbers_text
from mindspeed_precision.counting import count
from mindspeed_precision.diagnose.rules.registry import given_elsewhere
from mindspeed_precision.fold.folding import Folded
from mindspeed_precision.fold.scan import RankOutcome
from mindspeed_precision.records import Finding, Severity

ID = given_elsewhere("coverage.ranks_not_linked")


def not_linked(folded: Folded) -> tuple[list[Finding], list[str]]:
    """Say of which ranks a cause was not looked for: a finding where records differ or have no partner."""
    ranges = [piece for _, piece in folded.left_ranges]
    ranks = sorted({rank.rank for rank in folded.left} | {rank for rank, _ in folded.left_ranges})
    if not ranks:
        return [], []
    numbers = numbers_text(ranks)
    differing = sum(rank.differing for rank in folded.left) + sum(piece.differing for piece in ranges)
    alone = sum(map(_without_partner, folded.left)) + sum(piece.alone for piece in ranges)
    pairs = sum(rank.pairs for rank in folded.left) + sum(piece.pairs for piece in ranges)
    said = (
        f"ranks {numbers}: {pairs} records have a partner, {differing} "
        f"differ, {alone} of both runs have none or were not compared; memory does not hold these ranks, and "
        "what explains what was not looked for (a larger --memory)"
    )
    if not differing and not alone:
        return [], [said]
    finding = Finding(
        id=ID,
        severity=Severity.WARNING,
        confidence=1.0,
        title=f"{count(len(ranks), 'rank', 'were')} compared bit for bit at most: "
        "no cause was looked for there",
        evidence=(said,),
        remedy="compare with a larger --memory: the ranks that differ first are the ones that were looked at",
    )
    return [finding], []


def _without_partner(rank: RankOutcome) -> int:
    """Return how many records of both runs have no partner, or were not compared; ranges aside."""
    own = sum(2 * piece.pairs + piece.alone for piece in rank.ranges)
    return sum(side.records - rank.pairs for side in rank.sides if side) - own


__all__ = ["ID", "not_linked"]
