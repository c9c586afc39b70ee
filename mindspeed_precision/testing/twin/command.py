"""The command line of the twin."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor

from mindspeed_precision.testing.initial_weights import save_weights
from mindspeed_precision.testing.twin.defects import PROBES, Measurement
from mindspeed_precision.testing.twin.settings import CHOICES, TwinSettings
from mindspeed_precision.testing.twin.trainer import TwinStep, TwinTrainer

LINEAR_PATCHES = Path(__file__).with_name("patches")
PROGRAM = "python -m mindspeed_precision.testing.twin"


def main(words: Sequence[str]) -> None:
    """Train a twin and print its steps as Megatron does, or say which defects this MindSpore has.

    Raises:
        PrecisionError: the settings are wrong, or the run cannot be recorded.
    """
    arguments = _parser().parse_args(words)
    if arguments.probe:
        _tell_probes(as_json=arguments.json)
        return
    trainer = TwinTrainer(_settings(arguments))
    if arguments.save_weights:
        save_weights(arguments.save_weights, trainer.host_parameters())
    with _session(arguments, trainer) as session:
        if session is not None:
            trainer.forward_step = session.forward_step(trainer.forward_step)
        for _ in range(trainer.settings.steps):
            done = trainer.train_one_step()
            sys.stdout.write(log_line(done, trainer.settings) + "\n")
            sys.stdout.flush()
            if session is not None:
                session.step(loss=Tensor(np.float32(done.loss)), grad_norm=done.grad_norm)  # Megatron's types


def log_line(done: TwinStep, settings: TwinSettings) -> str:
    """Return the line of a step in Megatron's form, with more digits; iterations count from 1 there."""
    samples = (done.step + 1) * settings.microbatches * settings.micro_batch_size
    return (
        f" iteration {done.step + 1:8d}/{settings.steps:8d} | consumed samples: {samples:12d} | "
        f"learning rate: {done.learning_rate:.6E} | lm loss: {done.loss:.9E} | "
        f"grad norm: {done.grad_norm:.9f} |"
    )


def _tell_probes(*, as_json: bool) -> None:
    measured = {name: probe() for name, probe in PROBES.items()}
    if not as_json:
        sys.stdout.write("".join(f"{probe_line(found)}\n" for found in measured.values()))
        return
    told = {
        name: {"present": found.present, "follows_law": found.follows_law, "line": probe_line(found)}
        for name, found in measured.items()
    }
    sys.stdout.write(json.dumps(told) + "\n")


def probe_line(measured: Measurement) -> str:
    """Return what a probe found, for a person."""
    if not measured.present:
        verdict = "this MindSpore does not have the defect"
    else:
        verdict = "present, exactly as known" if measured.follows_law else "present, in another form"
    return f"MindSpore {measured.mindspore}: {measured.name}: {verdict}"


@contextmanager
def _session(arguments: argparse.Namespace, trainer: TwinTrainer) -> Iterator[Any]:
    """Yield the Session that records the run, or None without ``--precision-debug-out``."""
    if arguments.precision_debug_out is None:
        yield None
        return
    from mindspeed_precision.session import Session

    with Session(
        model=trainer.model,
        optimizer=trainer.optimizer,
        config=arguments.precision_debug_config,
        overrides=[f"patches.search_path=[{LINEAR_PATCHES}]", *arguments.precision_debug_set],
        out=arguments.precision_debug_out,
    ) as session:
        yield session


def _settings(arguments: argparse.Namespace) -> TwinSettings:
    return TwinSettings(**{field.name: getattr(arguments, field.name) for field in fields(TwinSettings)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    for field in fields(TwinSettings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", **_option(field.name, field.default))
    parser.add_argument(
        "--save-weights", type=Path, help="write the initial weights to this safetensors file"
    )
    parser.add_argument("--probe", action="store_true", help="say which defects this MindSpore has, and stop")
    parser.add_argument("--json", action="store_true", help="with --probe: as JSON")
    parser.add_argument("--precision-debug-out", type=Path, help="record the run into this directory")
    parser.add_argument("--precision-debug-config", type=Path, help="settings of the recording")
    parser.add_argument("--precision-debug-set", nargs="*", default=[], metavar="KEY=VALUE")
    return parser


def _option(name: str, default: Any) -> dict[str, Any]:
    if isinstance(default, bool):
        return {"action": "store_true"}
    if isinstance(default, tuple):
        return {"type": float, "nargs": len(default), "default": default}
    if name in CHOICES:
        return {"choices": CHOICES[name], "default": default}
    kind: Any = {"weights": Path, "min_lr": _rate_or_none}.get(name, type(default))
    return {"type": kind, "default": default}


def _rate_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)
