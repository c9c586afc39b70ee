"""Recorded trainings, each made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "record_layout.py"
QUIET = ("capture.level=tensor", "capture.modules=false", "capture.collectives=false")

Record = Callable[..., Path]


@pytest.fixture(scope="module")
def record(megatron: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return a function that trains some steps in processes of their own, once for each call alike."""
    from preloaded import run_training

    folder = tmp_path_factory.mktemp("layouts")
    known: dict[str, Path] = {}

    def train(
        processes: int,
        *,
        version: str = "0.17.1",
        start: Path | None = None,
        reference: Path | None = None,
        steps: int = 2,
        plant: str = "",
        more: tuple[str, ...] = QUIET,
        **settings,
    ) -> Path:
        runs = {"init_from": start, "reference": reference}
        overrides = [*more, *(f"{name}={path}" for name, path in runs.items() if path)]
        asked = json.dumps({"settings": settings, "steps": steps, "overrides": overrides, "plant": plant})
        call = f"{processes} {version} {asked}"
        if call not in known:
            out = folder / f"run{len(known)}"
            run_training(
                SCRIPT,
                [str(out), asked],
                processes=processes,
                megatron=megatron(version),
                log=folder / f"{out.name}.txt",
            )
            known[call] = out
        return known[call]

    return train
