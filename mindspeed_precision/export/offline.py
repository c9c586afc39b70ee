"""Export of a recorded run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from mindspeed_precision.counting import count
from mindspeed_precision.dump.reader import RankRecords, Run, load_run
from mindspeed_precision.errors import ConfigError, DumpError
from mindspeed_precision.export.live import rank_name
from mindspeed_precision.export.values import StepValues, seen_of
from mindspeed_precision.export.writers import TensorBoardWriter, WandbWriter
from mindspeed_precision.progress import Progress, silent, watched
from mindspeed_precision.records import INIT_STEP, CheckOutcome, Examination


def export_run(
    directory: str | Path, *, tensorboard: str = "", wandb: str = "", progress: Progress = silent
) -> Examination:
    """Export the statistics of every step of a run, rank by rank.

    Args:
        directory: of the run.
        tensorboard: directory for event files; each rank in ``NAME/rank00000`` below it.
        wandb: name of a project; each rank is a run of the group ``NAME``.
        progress: is told how many ranks were exported.

    Returns:
        What was exported, and where.

    Raises:
        ConfigError: neither was asked for.
        DumpError: the run cannot be read, or has no statistics; or there are event files already.
        PrecisionError: a package is not installed.
    """
    if not tensorboard and not wandb:
        raise ConfigError(
            "nothing to export to", where="export", expected="--tensorboard DIR or --wandb PROJECT"
        )
    run = load_run(directory)
    steps = {rank: _values(records) for rank, records in run.ranks.items()}
    if not any(values for per_step in steps.values() for values in per_step.values()):
        raise DumpError(
            "no record of this run has statistics",
            where=str(run.path),
            expected="capture.level=statistics or more",
            remedy="record it again",
        )
    name = run.path.absolute().name
    outcomes, places = [], []
    for rank, per_step in watched(steps.items(), progress, "exporting", len(steps)):
        for writer in _writers(run, name, rank, tensorboard, wandb):
            for step, values in sorted(per_step.items()):
                writer.add(step, values)
            writer.close()
            places.append(f"{writer.directory}")
        outcomes.append(
            CheckOutcome(
                name=rank_name(rank),
                holds=f"{rank_name(rank)}: {count(len(per_step), 'step')} exported",
                exercised=sum(map(len, per_step.values())),
                unit="numbers",
            )
        )
    if wandb:
        WandbWriter.end_service()
    return Examination(
        command="export",
        subjects={"run": str(run.path)},
        findings=(),
        outcomes=tuple(outcomes),
        notes=run.notes,
        headline=f"EXPORTED: {count(len(steps), 'rank')} of {name}.",
        tables={"written": tuple(places), "next": tuple(_next(tensorboard, wandb, places))},
    )


def _next(tensorboard: str, wandb: str, places: list[str]) -> list[str]:
    lines = [f"tensorboard --logdir {tensorboard}"] if tensorboard else []
    if wandb:
        lines.append("wandb sync " + " ".join(place for place in places if "offline-run-" in place))
    return lines


def _writers(
    run: Run, name: str, rank: int, tensorboard: str, wandb: str
) -> list[TensorBoardWriter | WandbWriter]:
    writers: list[TensorBoardWriter | WandbWriter] = []
    if tensorboard:
        writers.append(TensorBoardWriter(Path(tensorboard) / name / rank_name(rank)))
    if wandb:
        configuration = {"run": str(run.path), "parallel": run.manifest.get("parallel", {})}
        title = f"{name}/{rank_name(rank)}"
        writers.append(WandbWriter(wandb, run=title, group=name, configuration=configuration))
    return writers


def _values(records: RankRecords) -> dict[int, dict[str, float]]:
    collected: defaultdict[int, StepValues] = defaultdict(StepValues)
    for record in records.records:
        seen = seen_of(record)
        if seen is not None and record.key.step != INIT_STEP:
            collected[record.key.step].add(seen)
    return {step: dict(one.values()) for step, one in collected.items()}


__all__ = ["export_run"]
