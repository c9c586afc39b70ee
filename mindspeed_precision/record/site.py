"""Sites: what is the same each time a record is taken in one place of the program.

A step takes the records of the step before again: which level a record has and how its identity is written
is found out once, and looked up from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_precision.config import CaptureSettings
from mindspeed_precision.dump.encode import key_text
from mindspeed_precision.records import Level, Phase, RecordKey, Role

PRINTED = (Role.LOSS, Role.GRAD_NORM)
"""What a log prints, and every report wants the value of, whatever the level is."""

Identity = tuple[Phase, str, Role, str, int, int, bool]
"""Phase, fqn, role, slot, microbatch, occurrence and recomputed of a ``RecordKey``: all but the step."""

_SMALLEST_TABLE = 4096
"""Sites that are kept however few of them a step visits."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Site:
    """A place where a record is taken, once a step.

    Attributes:
        key: identity of its record in the step in which it was first visited.
        level: how much is kept of it.
        statistics: whether that includes the moments.
        sketch: whether it includes the sketch.
        payload: whether it includes the elements.
        text: identity as a record line holds it, without the step (``dump.encode.key_text``).
    """

    key: RecordKey
    level: Level
    statistics: bool
    sketch: bool
    payload: bool
    text: str


class SiteTable:
    """Finds the site of a record, or None where the settings drop it.

    Args:
        settings: which records are kept, and how much of them.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._tables: dict[tuple[bool, ...], dict[Identity, Site | None]] = {}
        self._step = 0
        self._sites: dict[Identity, Site | None] = {}

    def begin_step(self, step: int) -> None:
        """Use the sites of the steps to which the same rules apply as to ``step``."""
        self._step = step
        applies = tuple(step in rule.steps for rule in self._settings.rules if rule.steps.ranges)
        self._sites = self._tables.setdefault(applies, {})

    def find(self, identity: Identity) -> Site | None:
        """Return the site of a record of the running step."""
        try:
            return self._sites[identity]
        except KeyError:
            phase, fqn, role, slot, microbatch, occurrence, recomputed = identity
            key = RecordKey(
                step=self._step,
                microbatch=microbatch,
                phase=phase,
                fqn=fqn,
                role=role,
                slot=slot,
                occurrence=occurrence,
                recomputed=recomputed,
            )
            return self._sites.setdefault(identity, self._make(key))

    def end_step(self, records: int) -> None:
        """Forget the sites where there are many more than a step visits: names that change with the steps."""
        if len(self._sites) > max(4 * records, _SMALLEST_TABLE):
            self._sites.clear()

    def _make(self, key: RecordKey) -> Site | None:
        level = self._settings.level_of(key)
        if level is None:
            return None
        return Site(
            key=key,
            level=level,
            statistics=level.includes(Level.STATISTICS) or key.role in PRINTED,
            sketch=level.includes(Level.SKETCH),
            payload=level is Level.TENSOR,
            text=key_text(key),
        )
