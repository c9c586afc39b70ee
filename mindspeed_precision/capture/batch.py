"""What went in and what came out: batch tensors, sample ids, losses, states of the random generators."""

from __future__ import annotations

import functools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mindspeed_precision.capture.between_steps import tracker_states
from mindspeed_precision.capture.context import CaptureContext, contained
from mindspeed_precision.capture.modules import tensors_of
from mindspeed_precision.capture.names import unwrap
from mindspeed_precision.records import Phase, Role

BATCH = "batch"
LOSS = "loss"
RNG = "rng"


def observed_forward_step(context: CaptureContext, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron's ``forward_step(data_iterator, model, …)`` with its batch and its losses recorded.

    Everything is passed on as it came; only the iterator is seen through, and the loss function that is
    returned records what it returns.
    """
    chunks = {id(root): index for index, root in enumerate(context.names.roots)}

    def observe(
        wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        backend = context.backend
        if not (context.clock.in_step and context.training and backend.grad_enabled()):
            return wrapped(*args, **kwargs)
        iterator, model, rest = args[0], args[1], args[2:]
        context.clock.announce_forward(chunks.get(id(unwrap(backend, model)), 0))
        if iterator is not None and hasattr(iterator, "__next__"):
            iterator = ObservedIterator(context, iterator)
        returned = wrapped(iterator, model, *rest, **kwargs)
        if isinstance(returned, tuple) and len(returned) > 1 and callable(returned[1]):
            returned = (returned[0], _observed_loss(context, returned[1]), *returned[2:])
        return returned

    @functools.wraps(forward_step)
    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        given = (data_iterator, model, *args)
        return context.containment.call("a forward step", observe, forward_step, None, given, kwargs)

    return step


class ObservedIterator:
    """A data iterator that records each batch that is taken from it; all else is the iterator's own."""

    def __init__(self, context: CaptureContext, iterator: Any) -> None:
        self._context = context
        self._iterator = iterator

    def __iter__(self) -> ObservedIterator:
        return self

    def __next__(self) -> Any:
        contain = self._context.containment.run
        contain("a batch", journal.mark)
        batch = next(self._iterator)
        contain("a batch", self._observe, batch)
        return batch

    def _observe(self, batch: Any) -> None:
        clock = self._context.clock
        microbatch, occurrence = clock.forward_microbatch, clock.count(BATCH)
        backend = self._context.backend
        tensors = list(tensors_of(backend, batch))
        ids = journal.take()
        if ids is not None:
            tensors.append(("sample_ids", backend.integers(ids)))
        for slot, tensor in tensors:
            self._context.observe(
                Phase.BATCH,
                BATCH,
                Role.BATCH,
                tensor,
                slot=slot,
                microbatch=microbatch,
                occurrence=occurrence,
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _observed_loss(context: CaptureContext, loss_function: Callable[..., Any]) -> Callable[..., Any]:
    microbatch = context.clock.forward_microbatch

    def observe(returned: Any) -> None:
        for slot, tensor in tensors_of(context.backend, returned):
            # what is differentiated comes first; a report's entries keep their names ("2.lm loss": "lm loss")
            name = "" if slot == "0" else slot.partition(".")[2] or slot
            loss = context.backend.detach(tensor)
            context.observe(Phase.LOSS, LOSS, Role.LOSS, loss, slot=name, microbatch=microbatch)

    @functools.wraps(loss_function)
    def loss(*args: Any, **kwargs: Any) -> Any:
        returned = loss_function(*args, **kwargs)
        context.containment.run("the loss", observe, returned)
        return returned

    return loss


def observe_step_losses(context: CaptureContext, losses: dict[str, Any]) -> None:
    """Record the losses that the log of this step prints (empty except on the last pipeline stage)."""
    for name, value in losses.items():
        if context.backend.is_tensor(value):
            context.observe(Phase.LOSS, LOSS, Role.LOSS, context.backend.detach(value), slot=name)
        elif isinstance(value, (int, float)):
            context.observe_number(Phase.LOSS, LOSS, Role.LOSS, float(value), slot=name)


def observe_random_states(context: CaptureContext) -> None:
    """Record a digest of every random generator's state, at the start of a step."""
    numpy_state: Any = np.random.get_state()
    states: dict[str, Any] = {
        "python": repr(random.getstate()).encode(),
        "numpy": numpy_state[1].tobytes() + repr(numpy_state[2:]).encode(),
        **context.backend.random_states(),
        **tracker_states(),
    }
    for slot, state in states.items():
        if context.backend.is_tensor(state):
            context.observe(Phase.BATCH, RNG, Role.RNG, state, slot=slot)
        elif isinstance(state, bytes):
            site = context.recorder.site(Phase.BATCH, RNG, Role.RNG, slot)
            if site is not None:
                context.recorder.observe_bytes(site, state)


class _SampleJournal:
    """Which sample ids the samplers handed out, so that a batch can be told by its samples.

    With data-loader workers a sampler runs ahead of the batches, in order; the sampler that belongs to an
    iterator is the one that was asked while a batch was taken from it.
    """

    def __init__(self) -> None:
        self._handed_out: defaultdict[int, deque[list[int]]] = defaultdict(deque)
        self._asked: list[int] = []
        self._last: int | None = None

    def mark(self) -> None:
        """A batch is about to be taken."""
        self._asked.clear()

    def note(self, sampler: int, ids: list[int]) -> None:
        """A sampler handed out ``ids``."""
        self._handed_out[sampler].append(ids)
        self._asked.append(sampler)

    def take(self) -> list[int] | None:
        """Return the ids of the batch that was just taken, or None when no sampler is known for it."""
        if self._asked:
            self._last = self._asked[-1]
        if self._last is None or not self._handed_out[self._last]:
            return None
        return self._handed_out[self._last].popleft()


journal = _SampleJournal()


def observe_sample_ids(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Any]:
    """Note the sample ids that a batch sampler yields. Wraps its ``__iter__(self)``."""
    for ids in wrapped(*args, **kwargs):
        contained("the ids of a batch", _note_ids, instance, ids)
        yield ids


def _note_ids(sampler: object, ids: object) -> None:
    if isinstance(ids, list) and all(isinstance(item, int) for item in ids):
        journal.note(id(sampler), list(ids))
