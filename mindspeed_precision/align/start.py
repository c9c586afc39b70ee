"""Where two runs begin: a resumed run starts from what the other one had reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.records import INIT_STEP, Phase, Role, TensorRecord


@dataclass(frozen=True, kw_only=True)
class Start:
    """What stands for the parameters before the first compared step.

    Attributes:
        baseline: the step after which the baseline had them; ``INIT_STEP``: its initial ones; None: unknown.
        candidate: likewise.
        note: what a reader must know of it; empty for runs that begin together.
    """

    baseline: int | None = INIT_STEP
    candidate: int | None = INIT_STEP
    note: str = ""


def common_start(
    baseline: Run, candidate: Run, ranks: Sequence[int], *, reloaded: int | None = None
) -> Start:
    """Tell what to compare initial parameters with.

    ``reloaded`` is the first compared step where both runs begin it with one state: unless they began with
    that step, what was before does not matter.

    Runs that begin at different steps have different initial parameters and may yet agree: those of the later
    one are compared with what the earlier one had after the step before, if that was recorded.
    """
    one, two = (run.manifest.get("first_step") for run in (baseline, candidate))
    if reloaded is not None and not one == two == reloaded:
        note = f"initial parameters not compared: the state before step {reloaded} was loaded"
        return Start(baseline=None, candidate=None, note=note)
    if type(one) is not int or type(two) is not int or one == two:
        return Start()
    before = max(one, two) - 1
    earlier, side, other = (
        (baseline, "candidate", "baseline") if one < two else (candidate, "baseline", "candidate")
    )
    begins = f"the {side} begins at step {before + 1}, the {other} at step {min(one, two)}"
    if gathers_late(earlier) or not all(list(initial(earlier.ranks[rank], before)) for rank in ranks):
        return Start(baseline=None, candidate=None, note=f"{begins}: initial parameters not compared")
    return Start(
        baseline=before if one < two else INIT_STEP,
        candidate=INIT_STEP if one < two else before,
        note=f"{begins}: its initial parameters are compared with the {other}'s after step {before}",
    )


def initial(rank: RankRecords, start: int | None) -> Iterator[TensorRecord]:
    """Yield parameters and buffers as before the first compared step, with the keys of initial ones."""
    for record in rank.records:
        key = record.key
        if start is not None and key.step == start and key.role in (Role.PARAM, Role.BUFFER):
            yield replace(record, key=replace(key, step=INIT_STEP, phase=Phase.INIT))


def gathers_late(run: Run) -> bool:
    """Tell whether parameters were recorded before all ranks' updates had reached them."""
    config = run.manifest.get("config")
    ddp = config.get("ddp_config") if isinstance(config, dict) else None
    return bool(ddp.get("overlap_param_gather")) if isinstance(ddp, dict) else False
