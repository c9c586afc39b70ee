"""What a refined run must repeat: the bits of some records of the run that it was made from.

``compare --refine`` notes them for both sides in the settings of the second pass. A refined run carries them
in its manifest, so that comparing it needs no file of the first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import Phase, RecordKey, Role, Side

_FIELDS = "rank, step, microbatch, phase, fqn, role, slot, occurrence, recomputed, fingerprint"


@dataclass(frozen=True, kw_only=True)
class FirstRecord:
    """A record of a first run, of which a refined run must have the same bits.

    Attributes:
        rank: the rank that recorded it.
        key: identity, under the name that this side's run has for it.
        fingerprint: its bits.
    """

    rank: int
    key: RecordKey
    fingerprint: int

    def plain(self) -> list[Any]:
        """Return it as one short list, for YAML and JSON."""
        key = self.key
        return [
            *(self.rank, key.step, key.microbatch, key.phase.value, key.fqn, key.role.value, key.slot),
            *(key.occurrence, key.recomputed, f"{self.fingerprint:016x}"),
        ]


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """What is known of one first run.

    Attributes:
        run: its directory, as the comparison was given it: for people.
        records: what must come again, in execution order.
    """

    run: str
    records: tuple[FirstRecord, ...]


def read_first_runs(plain: Mapping[str, Any], *, where: str) -> dict[Side, FirstRun]:
    """Return what the settings say of the two first runs; empty where they are of no second pass.

    Args:
        plain: ``{baseline: {run, records}, candidate: {run, records}}``.
        where: for messages.

    Raises:
        ConfigError: a record is none.
    """
    runs = {side: plain[side.value] for side in Side}
    if not any(run["records"] for run in runs.values()):
        return {}
    return {
        side: FirstRun(
            run=str(run["run"]),
            records=tuple(
                _record(entry, f"{where}.{side.value}.records[{number}]")
                for number, entry in enumerate(run["records"])
            ),
        )
        for side, run in runs.items()
    }


def first_runs_of(manifest: Mapping[str, Any]) -> dict[Side, FirstRun]:
    """Return what a run's manifest says of the first runs; empty for a run that refines nothing.

    Raises:
        ConfigError: it says something else than this version writes.
    """
    settings = manifest.get("settings")
    plain = settings.get("refines") if isinstance(settings, dict) else None
    if not plain:
        return {}
    try:
        return read_first_runs(plain, where="run.json: settings.refines")
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "not what a refined run refines",
            where="run.json: settings.refines",
            found=repr(plain)[:80],
            expected="{baseline: {run, records}, candidate: {run, records}}",
        ) from error


def _record(entry: Sequence[Any], where: str) -> FirstRecord:
    try:
        rank, step, microbatch, phase, fqn, role, slot, occurrence, recomputed, bits = entry
        key = RecordKey(
            step=_whole(step),
            microbatch=_whole(microbatch),
            phase=Phase(phase),
            fqn=str(fqn),
            role=Role(role),
            slot=str(slot),
            occurrence=_whole(occurrence),
            recomputed=bool(recomputed),
        )
        return FirstRecord(rank=_whole(rank), key=key, fingerprint=int(str(bits), 16))
    except (TypeError, ValueError) as error:
        raise ConfigError("no record", where=where, found=str(entry)[:80], expected=f"[{_FIELDS}]") from error


def _whole(number: object) -> int:
    if type(number) is not int:
        raise TypeError(number)
    return number
