"""What every observer of one run shares, and which run is being observed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.capture.activations import ActivationPlacer
from mindspeed_precision.capture.clock import Call, Clock
from mindspeed_precision.capture.containment import Containment
from mindspeed_precision.capture.coverage import CoverageWitness
from mindspeed_precision.capture.names import Names
from mindspeed_precision.config import CaptureSettings
from mindspeed_precision.record.placement import parameter_of
from mindspeed_precision.record.recorder import Recorder
from mindspeed_precision.records import (
    NO_MICROBATCH,
    Part,
    Phase,
    Placement,
    Role,
)

_LOG = logging.getLogger(__name__)


class CaptureContext:
    """The observers' common ground: names, clock, recorder, coverage.

    Attributes:
        backend: the framework.
        names: canonical names of the model.
        clock: which step and microbatch it is.
        recorder: where observations go.
        settings: what is wanted.
        coverage: which parameters had dW.
        optimizer: the outermost optimizer that is observed, or None.
        reducing: gradients are being reduced; what runs meanwhile belongs to the reduction.
        gathering: parameters are being gathered; they are recorded as parameters.
        schedule: attributes of the learning rate's schedule, as plain data, once the loop has stepped it.
        waiting_sums: by parameter, copies of main_grad and of the dW that is being added to it.
        gathers_late: after the optimizer's step a rank has its own range of a parameter alone: the gather of
            the others runs beside the next forward.
        group_notes: by process group, what records of its collectives say of it.
        placements: by parameter, where this rank's tensor sits in the canonical one.
        placer: says the same of activations; None: nothing is placed.
        containment: through which everything is called that runs inside the training.
    """

    def __init__(
        self,
        *,
        backend: CaptureBackend,
        names: Names,
        recorder: Recorder,
        settings: CaptureSettings,
        placements: Mapping[str, Placement | None] | None = None,
        placer: ActivationPlacer | None = None,
        containment: Containment | None = None,
    ) -> None:
        self.backend = backend
        self.names = names
        self.clock = Clock(backend.inside_backward)
        self.recorder = recorder
        self.settings = settings
        self.coverage = CoverageWitness()
        self.optimizer: Any = None
        self.schedule: dict[str, Any] = {}
        self.waiting_sums: dict[str, tuple[Any, Any]] = {}
        self.group_notes: dict[Any, str] = {}
        self.reducing = False
        self.gathering = False
        self.gathers_late = False
        self.placements = dict(placements or {})
        self.placer = placer
        self.containment = containment or Containment()
        self.parameter_names = {id(parameter): fqn for fqn, parameter in names.parameters}

    @property
    def training(self) -> bool:
        """Whether a forward seen now belongs to training: not evaluation, not generation."""
        return all(self.backend.is_training(root) for root in self.names.roots)

    def observe(
        self,
        phase: Phase,
        fqn: str,
        role: Role,
        tensor: Any,
        *,
        slot: str = "",
        microbatch: int = NO_MICROBATCH,
        occurrence: int = 0,
        recomputed: bool = False,
        note: str = "",
        elements: tuple[int, int] | None = None,
    ) -> None:
        """Hand one live tensor to the record stage.

        ``elements`` is, of a parameter-like tensor, the range of what this rank holds that it is; None: all.
        """
        site = self.recorder.site(phase, fqn, role, slot, microbatch, occurrence, recomputed)
        if site is None:
            return
        name = parameter_of(site.key, self.placements)
        part, place = None, None
        if name is not None:
            part = self._part(self.placements[name], tensor, elements)
        elif self.placer is not None and self.placer.active:
            shape = self.backend.shape(tensor)
            place = self.placer.place(site.key, shape, self.backend.dtype(tensor))
            if isinstance(place, Placement) and not place.whole:
                part = Part(placement=place, start=0, stop=math.prod(shape))
        self.recorder.observe(site, tensor, note=note, part=part, place=place)

    def _part(
        self, placement: Placement | None, tensor: Any, elements: tuple[int, int] | None
    ) -> Part | None:
        """Return which elements of a parameter ``tensor`` is; None: of none, or all of it."""
        if placement is None or (elements is None and placement.whole):
            return None
        start, stop = elements or (0, placement.local_numel)
        if math.prod(self.backend.shape(tensor)) != stop - start:
            return None
        part = Part(placement=placement, start=start, stop=stop)
        return None if part.whole else part

    def observe_call(
        self, call: Call, phase: Phase, role: Role, tensor: Any, slot: str = "", note: str = ""
    ) -> None:
        """Hand over a tensor of one module call. Backward records are never marked as recomputed."""
        self.observe(
            phase,
            call.fqn,
            role,
            tensor,
            slot=slot,
            microbatch=call.microbatch,
            occurrence=call.occurrence,
            recomputed=call.recomputed and phase is Phase.FPROP,
            note=note,
        )

    def observe_number(self, phase: Phase, fqn: str, role: Role, value: float, *, slot: str = "") -> None:
        """Hand a host number of the whole step to the record stage."""
        site = self.recorder.site(phase, fqn, role, slot)
        if site is not None:
            self.recorder.observe_number(site, value)


_active: list[CaptureContext] = []


def contained(where: str, function: Callable[..., None], *args: Any) -> None:
    """Call ``function``, of no run in particular: its failure ends the capture of the one that runs."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001  the training goes on
        if not _active:
            _LOG.exception("mindspeed_precision: %s failed; training goes on", where)
        for context in _active[-1:]:
            context.containment.failed(where, error)


def active() -> CaptureContext | None:
    """Return the context of the run that is being observed and is inside a step, or None."""
    return _active[-1] if _active and _active[-1].clock.in_step else None


@contextmanager
def activated(context: CaptureContext) -> Iterator[CaptureContext]:
    """Make ``context`` the one that the patches' wrappers report to."""
    _active.append(context)
    try:
        yield context
    finally:
        _active.remove(context)
