"""The trainings behind docs/tolerance.md: healthy pairs, and perturbed runs of their baselines.

Every run is kept in a folder and is trained once: a second call measures what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import ExternalCommandError
from mindspeed_precision.testing.demo.launch import run_training

SMALL = {"hidden": 64, "kv_groups": 2}
GATED = {
    "layers": 4,
    "hidden": 128,
    "kv_groups": 2,
    "swiglu": True,
    "rmsnorm": True,
    "untie": True,
    "seed": 7,
}
DEEP = {"layers": 48, "hidden": 32}
NOISE = ("perturb.epsilon=auto",)
QUIET = ("capture.modules=false",)


@dataclass(frozen=True, kw_only=True)
class Group:
    """One model: what it is, how long it is trained, in which layouts.

    Attributes:
        name: of its folder.
        settings: of the trainer.
        steps: training steps.
        layouts: names of ``LAYOUTS``.
        seeds: of the noise.
        more: settings of the recording.
    """

    name: str
    settings: dict[str, Any]
    steps: int = 3
    layouts: tuple[str, ...] = ("tp2", "sp2", "pp2")
    seeds: tuple[int, ...] = (0, 1)
    more: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes, what is split, and the baseline that it is compared with."""

    processes: int
    settings: dict[str, Any] = field(default_factory=dict)
    baseline: str = "base"


LAYOUTS = {
    "tp2": Layout(processes=2, settings={"tp": 2}),
    "sp2": Layout(processes=2, settings={"tp": 2, "sequence_parallel": True}),
    "pp2": Layout(processes=2, settings={"pp": 2}),
    "dp2": Layout(processes=2, settings={"microbatches": 2}, baseline="base4"),
    "do2": Layout(processes=2, settings={"microbatches": 2, "distributed_optimizer": True}, baseline="base4"),
}
BASELINES: dict[str, dict[str, Any]] = {"base": {}, "base4": {"microbatches": 4}}


def groups(name: str) -> Iterator[Group]:
    """Yield the models of one measurement, in float32 and bfloat16."""
    for letter, dtype in (("f", "fp32"), ("b", "bf16")):
        with_dtype = {"dtype": dtype}
        if name == "ratios":
            layouts = ("tp2", "sp2", "pp2", "dp2", "do2")
            yield Group(name=f"{letter}2", settings={**SMALL, **with_dtype}, layouts=layouts)
            yield Group(name=f"{letter}4", settings={**GATED, **with_dtype})
        if name == "steps":
            settings = {**SMALL, **with_dtype}
            yield Group(
                name=f"{letter}20",
                settings=settings,
                steps=20,
                layouts=("tp2", "sp2"),
                seeds=(0,),
                more=QUIET,
            )
        if name == "depth":
            yield Group(
                name=f"{letter}48", settings={**DEEP, **with_dtype}, steps=2, layouts=("tp2",), seeds=(0,)
            )


def train(folder: Path, group: Group) -> Path:
    """Train and record the runs of a group that are not there yet; return its folder."""
    home = folder / group.name
    wanted = {LAYOUTS[layout].baseline for layout in group.layouts}
    start = _record(home / "base", group, 1, {})
    for baseline in sorted(wanted):
        _record(home / baseline, group, 1, BASELINES[baseline], start)
        for seed in group.seeds:
            noise = (*NOISE, f"perturb.seed={seed}")
            _record(home / f"{baseline}-noise{seed}", group, 1, BASELINES[baseline], start, noise)
    for name in group.layouts:
        layout = LAYOUTS[name]
        _record(home / name, group, layout.processes, layout.settings, start)
    return home


def _record(
    out: Path,
    group: Group,
    processes: int,
    settings: dict[str, Any],
    start: Path | None = None,
    more: tuple[str, ...] = (),
) -> Path:
    if (out / "run.json").exists():
        return out
    overrides = ["capture.level=tensor", "capture.collectives=false", *group.more, *more]
    overrides += [f"init_from={start}"] if start is not None else []
    asked = {"settings": {**group.settings, **settings}, "steps": group.steps, "overrides": overrides}
    log = out.with_suffix(".txt")
    try:
        run_training(
            Path(__file__), [str(out), json.dumps(asked)], processes=processes, log=log, timeout=3600
        )
    except ExternalCommandError as error:
        sys.exit(f"{out.name}: {error}")
    return out


if __name__ == "__main__":  # one rank of one of them
    from mindspeed_precision.testing.recorded import record_training
    from mindspeed_precision.testing.trainer import TrainerSettings

    job = json.loads(sys.argv[2])
    record_training(
        TrainerSettings(**job["settings"]), Path(sys.argv[1]), steps=job["steps"], overrides=job["overrides"]
    )
