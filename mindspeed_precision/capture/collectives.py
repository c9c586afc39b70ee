"""Collectives: what each rank gives to them and gets back, in modules, in their backward, in the reduction.

A partial sum is no module's output, and a reduced gradient is seen only after every reduction: what happens
in between is seen here. Point-to-point transfers are not: their tensors are a stage's outputs and inputs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.capture.context import CaptureContext, active
from mindspeed_precision.capture.modules import tensors_of
from mindspeed_precision.record.process_group import group_note
from mindspeed_precision.records import NO_MICROBATCH, Phase, Role

COLLECTIVE = "collective"
"""Name of what no module can be named for: the reduction, and the backward of what is no linear."""

_ROLES = {
    Phase.FPROP: (Role.INPUT, Role.OUTPUT),
    Phase.DGRAD: (Role.GRAD_OUTPUT, Role.GRAD_INPUT),
    Phase.REDUCE: (Role.MAIN_GRAD, Role.REDUCED_GRAD),
}
_running = threading.local()

Observer = Callable[[Callable[..., Any], object, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where in the step a collective is called."""

    phase: Phase
    fqn: str
    microbatch: int = NO_MICROBATCH
    recomputed: bool = False


def _observer(name: str, given: tuple[int, str], got: tuple[int, str], group: int) -> Observer:
    """Return the wrapper that records the collective ``name``.

    Of an asynchronous call the result is recorded when its handle is waited for. A collective that is made of
    others is recorded once.

    Args:
        name: the slot of its records. A declaration chooses the wrapper, so that it does not matter what the
            function that stands there calls itself: others may have wrapped it.
        given: position and keyword of what is given to it.
        got: position and keyword of what comes back.
        group: position of the process group, whose keyword is ``group``.
    """

    def observe(
        wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        context = active()
        place = None if context is None or not context.settings.collectives else _place(context)
        if context is None or place is None or getattr(_running, "inside", False):
            return wrapped(*args, **kwargs)
        occurrence = context.clock.count_collective(place.phase, place.microbatch, f"{place.fqn}.{name}")
        given_role, got_role = _ROLES[place.phase]
        note = _group_note(context, _operand((group, "group"), args, kwargs))
        _observe(context, place, given_role, name, _operand(given, args, kwargs), occurrence, note)
        _running.inside = True
        try:
            work = wrapped(*args, **kwargs)
        finally:
            _running.inside = False

        def done() -> None:
            _observe(context, place, got_role, name, _operand(got, args, kwargs), occurrence, note)

        if _coalescing():  # nothing has run yet; what comes back is recorded as the reduced gradient
            return work
        if hasattr(work, "wait"):  # the handle of an asynchronous call
            return ObservedWork(work, context.containment.hook(f"the result of {name}", done))
        done()
        return work

    return observe


observe_all_reduce = _observer("all_reduce", (0, "tensor"), (0, "tensor"), 2)
observe_broadcast = _observer("broadcast", (0, "tensor"), (0, "tensor"), 2)
observe_all_gather_into_tensor = _observer(
    "all_gather_into_tensor", (1, "input_tensor"), (0, "output_tensor"), 2
)
observe_all_gather = _observer("all_gather", (1, "tensor"), (0, "tensor_list"), 2)
observe_reduce_scatter_tensor = _observer("reduce_scatter_tensor", (1, "input"), (0, "output"), 3)
observe_reduce_scatter = _observer("reduce_scatter", (1, "input_list"), (0, "output"), 3)
observe_all_to_all_single = _observer("all_to_all_single", (1, "input"), (0, "output"), 4)


class ObservedWork:
    """The handle of an asynchronous collective; records the result once it has been waited for."""

    def __init__(self, work: Any, done: Callable[[], None]) -> None:
        self._work = work
        self._done: Callable[[], None] | None = done

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the handle does, then record."""
        result = self._work.wait(*args, **kwargs)
        if self._done is not None:
            done, self._done = self._done, None
            done()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def observe_reduction(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Note that what is called inside reduces gradients. Wraps what starts and what ends a reduction."""
    return _marked("reducing", wrapped, args, kwargs)


def observe_parameter_gather(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Note that what is called inside gathers parameters: they are recorded as such, not as inputs."""
    return _marked("gathering", wrapped, args, kwargs)


def _marked(mark: str, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = active()
    if context is None:
        return wrapped(*args, **kwargs)
    before = getattr(context, mark)
    setattr(context, mark, True)
    try:
        return wrapped(*args, **kwargs)
    finally:
        setattr(context, mark, before)


def _place(context: CaptureContext) -> _Place | None:
    """Return where a collective is called now; None where it is about no tensor of the step (logs, norms)."""
    clock = context.clock
    if context.gathering:
        return None
    if context.reducing:
        return _Place(phase=Phase.REDUCE, fqn=COLLECTIVE)
    call = clock.current
    if call is not None:
        return _Place(phase=Phase.FPROP, fqn=call.fqn, microbatch=call.microbatch, recomputed=call.recomputed)
    if clock.inside_backward():
        return _Place(phase=Phase.DGRAD, fqn=COLLECTIVE, microbatch=clock.backward_microbatch)
    return None


def _operand(where: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position, keyword = where
    return args[position] if position < len(args) else kwargs.get(keyword)


def _group_note(context: CaptureContext, group: Any) -> str:
    """Return the ranks of a process group in words, asked once per group; empty where nobody can tell."""
    if group not in context.group_notes:
        try:
            ranks = context.backend.group_ranks(group)
        except Exception:  # noqa: BLE001  a group that is none of the framework's; the check says that it is not known
            ranks = ()
        context.group_notes[group] = group_note(ranks) if ranks else ""
    return context.group_notes[group]


def _observe(
    context: CaptureContext, place: _Place, role: Role, name: str, operand: Any, occurrence: int, note: str
) -> None:
    for index, tensor in tensors_of(context.backend, operand):
        context.observe(
            place.phase,
            place.fqn,
            role,
            context.backend.detach(tensor),
            slot=f"{name}.{index}" if index else name,
            microbatch=place.microbatch,
            occurrence=occurrence,
            recomputed=place.recomputed,
            note=note,
        )


def _coalescing() -> bool:
    """Tell whether collectives are only collected now, to be run together later."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return bool(getattr(world, "pg_coalesce_state", None))
