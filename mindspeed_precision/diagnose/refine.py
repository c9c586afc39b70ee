"""The settings of a second pass: two short runs that keep the elements of the divergent window.

Of everything else as much is kept as judges it again (bits, where bits decide), and the settings say which
bits the second runs must have, so that their proof is one for the first ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mindspeed_precision.align.compatible import ranges_of
from mindspeed_precision.config import CaptureRule, NumberSet, default_settings
from mindspeed_precision.diagnose.facts import Facts
from mindspeed_precision.diagnose.replay import REPLAYS
from mindspeed_precision.diagnose.window import Place, divergent_window
from mindspeed_precision.dump.format import FINGERPRINT
from mindspeed_precision.dump.later import records_until
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.record.elements import width_of
from mindspeed_precision.records import (
    INIT_STEP,
    Diagnosis,
    Finding,
    Level,
    Phase,
    Refinement,
    Role,
    Side,
    TensorRecord,
)
from mindspeed_precision.repeats import FirstRecord

_MOST_NOTED = 200
"""Records of each side whose bits are noted; an origin's window has a dozen."""
_SURE = 0.9
"""From here on a cause that no replay is for needs no elements."""
_IDENTIFYING = (Role.BATCH, Role.LOSS, Role.GRAD_NORM)
_OWN = re.compile(r"(out|steps|stop_after|capture\.level|capture\.rules|export\..*|refines\..*)")
"""Settings of a first run that the second pass makes anew."""


@dataclass(frozen=True, kw_only=True)
class First:
    """A first run as it was read.

    Attributes:
        run: under its own names, with its own ranks.
        names: its names by those under which it was aligned; without those that are equal.
    """

    run: Run
    names: Mapping[str, str]


Ranked = tuple[int, TensorRecord]
"""A record with the rank that recorded it."""


def plan_refinement(facts: Facts, diagnosis: Diagnosis, first: Mapping[Side, First]) -> Refinement | None:
    """Return how a second pass keeps the window; None where nothing diverged, or all of it was kept."""
    places = divergent_window(facts, diagnosis.findings)
    if not places:
        return None
    step = facts.origins[0].key.step
    rules = list(dict.fromkeys(rule for side in Side for rule in _rules(places, first[side].names)))
    kept = {side: list(_kept(first[side].run, rules)) for side in Side}
    if all(record.payload is not None for held in kept.values() for _, record in held):
        return None
    ranks = frozenset().union(*(place.ranks for place in places))
    noted = {side: _noted(first[side].run, kept[side], ranks, step) for side in Side}
    shared, overrides = _settings(first)
    settings: dict[str, Any] = {
        "steps": ranges(number for number in facts.alignment.steps if number <= step),
        "stop_after": step,
        **shared,
        "capture": {
            **shared.get("capture", {}),
            "level": _level(facts, first).value,
            "rules": [_plain(rule) for rule in rules],
        },
        "refines": {
            side.value: {"run": str(first[side].run.path), "records": [one.plain() for one in noted[side]]}
            for side in Side
        },
    }
    payload = {side: sum(record.numel * width_of(record.dtype) for _, record in kept[side]) for side in Side}
    largest = max(Side, key=lambda side: payload[side])
    return Refinement(
        settings=settings,
        overrides=overrides,
        stop_after=step,
        records=len(kept[largest]),
        payload_bytes=payload[largest],
        bytes=payload[largest] + _index_bytes(first[largest].run, step),
        wanted=_wanted(diagnosis),
    )


def _wanted(diagnosis: Diagnosis) -> bool:
    """Tell whether elements may prove the first divergence's cause, or tell more than is known of it."""
    first = diagnosis.first_divergence
    causes = [finding for finding in diagnosis.findings if first and first.key in finding.explains]
    return not causes or not _settled(causes[0])


def _settled(finding: Finding) -> bool:
    return finding.proved_by_replay or (finding.confidence >= _SURE and finding.id not in REPLAYS)


def _rules(places: Sequence[Place], names: Mapping[str, str]) -> Iterator[CaptureRule]:
    """Yield a rule for each place, under the names that a side has for it."""
    for place in places:
        renamed = [own for name, own in names.items() if fnmatchcase(name, place.fqn)]
        for fqn in renamed or [place.fqn]:
            yield CaptureRule(
                fqn=fqn,
                role=place.role,
                phase=place.phase.value,
                steps=_numbers("" if place.step == INIT_STEP else str(place.step)),
                microbatches=_numbers("" if place.microbatch is None else str(place.microbatch)),
                ranks=_numbers(ranges(place.ranks)),
                level=Level.TENSOR,
            )


def _numbers(text: str) -> NumberSet:
    return NumberSet.parse(text, where="the divergent window")


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as settings have them: ``0-3,10``."""
    return ",".join(ranges_of(sorted(set(numbers))))


def _plain(rule: CaptureRule) -> dict[str, str]:
    numbers = {name: getattr(rule, name).text for name in ("steps", "microbatches", "ranks")}
    return {
        "fqn": rule.fqn,
        "role": rule.role,
        "phase": rule.phase,
        **{name: text for name, text in numbers.items() if text},
        "level": Level.TENSOR.value,
    }


def _kept(run: Run, rules: Sequence[CaptureRule]) -> Iterator[Ranked]:
    """Yield the records of a first run that the rules keep with their elements."""
    phases = {rule.phase for rule in rules}
    steps = [rule.steps for rule in rules]
    for rank, held in run.ranks.items():
        here = [rule for rule in rules if rank in rule.ranks]
        wanted = {step for step in held.steps if any(step in numbers for numbers in steps)} if here else set()
        for record in held.records if wanted else ():
            key = record.key
            if key.step in wanted and key.phase.value in phases and any(rule.applies(key) for rule in here):
                yield rank, record


def _noted(run: Run, kept: Sequence[Ranked], ranks: frozenset[int], step: int) -> list[FirstRecord]:
    """Return what the second run must repeat: the window, its batches, and every loss and norm until then.

    Nothing of a run whose fingerprints are of an older definition: the second run's say nothing of them.
    """
    if any(rank.fingerprint != FINGERPRINT for rank in run.ranks.values()):
        return []
    told = [
        (rank, record)
        for rank in sorted(ranks & set(run.ranks))
        for record in run.ranks[rank].records
        if record.key.role in _IDENTIFYING
        and record.key.step <= step
        and (record.key.phase is not Phase.BATCH or record.key.step == step)
    ]
    last = {(rank, record.key): record for rank, record in [*kept, *told]}  # of a step that ran twice
    chosen = sorted(list(last)[:_MOST_NOTED], key=lambda place: (last[place].seq, place[0]))
    return [
        FirstRecord(rank=rank, key=key, fingerprint=last[rank, key].digest.fingerprint)
        for rank, key in chosen
    ]


def _level(facts: Facts, first: Mapping[Side, First]) -> Level:
    """Return what is kept of all else: bits where bits decide, else what the first runs were judged by."""
    if facts.policy.exact:
        return Level.FINGERPRINT
    levels = [Level.STATISTICS]
    for one in first.values():
        some = next(iter(one.run.ranks.values())).records
        judged = [r for r in some if r.key.step != INIT_STEP and r.numel > 1 and "float" in r.dtype]
        shown = [r for r in judged if r.digest.sketch is not None or r.payload is not None]
        if 2 * len(shown) > len(judged):  # a rule may have kept some
            levels.append(Level.SKETCH)
    return max(levels, key=lambda level: level.rank)


def _settings(first: Mapping[Side, First]) -> tuple[dict[str, Any], dict[Side, tuple[str, ...]]]:
    """Return the settings of both first runs where they are not the default, and those of one alone."""
    defaults = _leaves(default_settings())
    had = {
        side: {name: value for name, value in _leaves(_noted_settings(one.run)).items() if name in defaults}
        for side, one in first.items()
    }
    shared: dict[str, Any] = {}
    overrides: dict[Side, list[str]] = {side: [] for side in Side}
    for name, default in defaults.items():
        values = {side: had[side].get(name, default) for side in Side}
        if _OWN.fullmatch(name):
            continue
        if values[Side.BASELINE] == values[Side.CANDIDATE]:
            if values[Side.BASELINE] != default:
                _put(shared, name, values[Side.BASELINE])
            continue
        for side, value in values.items():
            if value != default:
                overrides[side].append(f"{name}={_text(value)}")
    return shared, {side: tuple(found) for side, found in overrides.items()}


def _noted_settings(run: Run) -> Mapping[str, Any]:
    found = run.manifest.get("settings")
    return found if isinstance(found, dict) else {}


def _leaves(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _put(plain: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        plain = plain.setdefault(section, {})
    plain[last] = value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _index_bytes(run: Run, step: int) -> int:
    """Return what the lines of the steps until ``step`` took in the first run: no more in the second."""
    total = 0
    for held in run.ranks.values():
        size = sum(path.stat().st_size for path in held.directory.glob("index*"))
        lines = records_until(held, step)
        total += size * lines // max(len(held.records), 1)
    return total
