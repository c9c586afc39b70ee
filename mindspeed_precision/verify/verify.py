"""``verify BASELINE CANDIDATE``: whether two runs were given the same training to do."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from pathlib import Path

from mindspeed_precision.align.mapping import Mapping, load_mapping
from mindspeed_precision.dump.reader import Run, load_run
from mindspeed_precision.records import Examination, Side
from mindspeed_precision.verify.aliases import read_configuration
from mindspeed_precision.verify.pair import PAIR
from mindspeed_precision.verify.pair.groups import group_lines
from mindspeed_precision.verify.pair_facts import is_read, pair_facts


def verify_runs(
    baseline: str | Path | Run,
    candidate: str | Path | Run,
    *,
    mapping: Sequence[str | Path | Mapping] = (),
    configurations: MappingType[Side, str | Path] | None = None,
    every: bool = False,
) -> Examination:
    """Compare configuration, parameter groups, environment, data and initial weights of two runs.

    Args:
        baseline: run directory, or a run that was loaded; the one to agree with.
        candidate: the same, of the run that is examined.
        mapping: mapping files for what the runs name differently, or loaded ones; applied in order.
        configurations: by side, the YAML file with which a run was launched, where its ``run.json`` does not
            hold its configuration (MindFormers).
        every: the table of parameters also shows those that do not differ.

    Returns:
        The findings, worst first, what each check looked at, and the two sides parameter by parameter.

    Raises:
        DumpError: a run cannot be read.
        IncomparableError: the fingerprints are of two definitions, and elements were not kept.
        ConfigError: a mapping or configuration file is none.
    """
    maps = [one if isinstance(one, Mapping) else load_mapping(one) for one in mapping]
    given = {side: read_configuration(file) for side, file in (configurations or {}).items()}
    # a mapping speaks of names of any record
    wanted = None if maps else is_read
    one = baseline if isinstance(baseline, Run) else load_run(baseline, wanted=wanted)
    two = candidate if isinstance(candidate, Run) else load_run(candidate, wanted=wanted)
    facts = pair_facts(one, two, maps, given)
    findings, outcomes = PAIR.ask_all(facts)
    lines = group_lines(facts, every=every)
    notes = [*facts.notes, *_notes(facts.other_layout)]
    for side in Side:
        unknown = facts.settings[side].unknown
        if unknown:
            notes.append(
                f"{len(unknown)} keys of the {side.value}'s configuration have no name in Megatron's"
            )
    return Examination(
        command="verify",
        subjects={"baseline": str(one.path), "candidate": str(two.path)},
        findings=findings,
        outcomes=outcomes,
        notes=tuple(notes),
        tables={"groups": lines} if lines else {},
    )


def _notes(layouts: str) -> list[str]:
    return [f"the parallel layouts differ ({layouts}): shards were put together"] if layouts else []
