"""The state of another run, loaded into this one: at its start, or before every step (teacher forcing).

Initial weights depend on the parallel layout, so runs of different layouts need a common start. And rounding
noise grows with every update: a run that takes the state of its reference before each step computes each step
from what the reference computed it from, so that step N is compared as sharply as step 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_precision.align.forced import loaded_states, reference_of
from mindspeed_precision.align.state import RecordedStates
from mindspeed_precision.config import NumberSet, PerturbSettings
from mindspeed_precision.dump.reader import load_run
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.live_state import LiveState
from mindspeed_precision.perturbation import perturb


def start_from(directory: str | Path, chunks: list[Any], optimizer: Any) -> None:
    """Load the parameters that a recorded run began with, by canonical name, into this rank's shards.

    The optimizer's own copies of the parameters follow. Called before the first step.

    Args:
        directory: the run; its layout may be any.
        chunks: the model chunks of this rank.
        optimizer: the one that the loop steps; or None.

    Raises:
        ConfigError: a parameter was not recorded there with all its elements, or this framework cannot load.
        IncomparableError: a parameter has another shape or dtype there.
        DumpError: the run cannot be read.
    """
    live = LiveState(chunks, optimizer, setting="init_from")
    states = RecordedStates(load_run(directory))
    live.load_parameters(states.before(states.first))


class TeacherForcing:
    """Gives a run, before each step that will be compared, the state that its reference had there.

    A step is compared if both runs record it; of such a step the reference must have kept the state. Steps
    that the reference did not record run freely.

    Args:
        directory: the reference; its layout may be any.
        chunks: the model chunks of this rank.
        optimizer: the one that the loop steps; or None.
        steps: the steps that this run records.
        first_step: the step with which this run begins.
        noise: is put on the parameters of every state that was loaded, where it is enabled: such a run shows
            what rounding does within one step.

    Attributes:
        steps: the steps that begin with the reference's state, each with the digest of that state.

    Raises:
        ConfigError: the reference did not keep the state of a step, or nothing can be loaded here.
        DumpError: the reference cannot be read.
    """

    def __init__(
        self,
        directory: str | Path,
        chunks: Sequence[Any],
        optimizer: Any,
        *,
        steps: NumberSet,
        first_step: int,
        noise: PerturbSettings,
    ) -> None:
        self._directory = str(directory)
        self._live = LiveState(chunks, optimizer, setting="reference")
        run = load_run(directory)
        self._states = RecordedStates(run)
        self._loaded: int | None = None
        self._noise, self._chunks, self._optimizer = noise, chunks, optimizer
        compared = [step for step in self._states.steps if step in steps and step >= first_step]
        if not compared:
            raise ConfigError(
                "this run records no step that its reference recorded",
                where="reference",
                found=f"steps {steps.text or 'all'} from {first_step}",
                expected=f"some of {', '.join(map(str, self._states.steps))} of {directory}",
            )
        if loaded_states(run).keys() & set(compared):
            raise ConfigError(
                "the reference took the state of its steps from another run",
                where=str(directory),
                found=reference_of(run),
                remedy="take that run for the reference",
            )
        self.steps: Mapping[int, str] = {step: self._required(step, first_step) for step in compared}

    def _required(self, step: int, first_step: int) -> str:
        state = self._states.before(step)
        if state.initial and step != first_step:
            raise ConfigError(
                f"the reference began with step {step}, with an optimizer that was not recorded",
                where="reference",
                found=f"this run begins with step {first_step}",
                remedy="begin both with the same checkpoint, or leave that step out (setting steps)",
            )
        try:
            state.require()
        except ConfigError as error:
            rest = f"; or leave step {step} out: let the setting steps name those alone whose state it kept"
            raise replace(error, remedy=error.remedy + rest) from error
        return state.digest

    @property
    def manifest(self) -> dict[str, Any]:
        """What the run directory says of it: the reference, and the digest of each state that was loaded."""
        return {"run": self._directory, "states": {str(step): digest for step, digest in self.steps.items()}}

    def before(self, step: int) -> None:
        """Load the reference's state before ``step``, if that step is compared.

        Raises:
            ConfigError: something here has no counterpart in the reference's state.
            IncomparableError: a tensor has another shape or dtype there.
            DumpError: the reference cannot be read.
        """
        if step not in self.steps or step == self._loaded:
            return
        state = self._states.before(step)
        self._live.load_parameters(state)
        if not state.initial:  # of its first step it knows no more: both optimizers begin as they begin
            self._live.load_optimizer(state)
        if self._noise.enabled:
            perturb(self._noise, self._chunks, self._optimizer)
        self._loaded = step
