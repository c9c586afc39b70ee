"""Token losses are the cross entropy of the logits, and the logits' gradient is that of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.records import TensorRecord
from mindspeed_precision.verify.elements import Vector, roundoff
from mindspeed_precision.verify.failures import Failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.places import tensor_group
from mindspeed_precision.verify.recomputation.calls import ModuleCall, calls_of, elements
from mindspeed_precision.verify.recomputation.exact import Exact, Left, summed
from mindspeed_precision.verify.recomputation.judging import against
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_replica

_MOST = 1 << 26
"""Logits of one microbatch above which they are left out."""


@dataclass(frozen=True, kw_only=True)
class _Prediction:
    """Of one microbatch: ``logits [s, b, v]`` over the whole vocabulary, ``labels [s, b]``.

    Attributes:
        model: the call of the model, whose output is the token losses ``[b, s]``.
        head: the call of the output layer on this rank.
        logits: of all ranks of the tensor-parallel group.
        labels: of the tokens.
        first: first entry of the vocabulary on this rank.
    """

    model: ModuleCall
    head: ModuleCall
    logits: Vector
    labels: NDArray[np.int64]
    first: int


@invariant(
    "loss.not_of_logits",
    holds="token losses are the cross entropy of the logits and the labels over the whole vocabulary",
    unit="microbatches",
    span=[each_replica()],
)
def of_logits(facts: RunFacts) -> Answer:
    """Compute the token losses anew."""
    return _answer(
        facts,
        _exact_losses,
        id_="loss.not_of_logits",
        title="token losses are not the cross entropy of the logits",
        remedy="the loss: logits that are whole on every rank but summed over the group, a vocabulary range, "
        "labels that are shifted, a softmax in 16 bits",
    )


@invariant(
    "loss.gradient_not_of_logits",
    holds="the gradient of the logits is (softmax - label) times that of the token loss",
    unit="microbatches",
    span=[each_replica()],
)
def gradient_of_logits(facts: RunFacts) -> Answer:
    """Compute the gradient of the logits anew."""
    return _answer(
        facts,
        _exact_gradient,
        id_="loss.gradient_not_of_logits",
        title="the gradient of the logits is not that of the cross entropy",
        remedy="the backward of the cross entropy: logits that were overwritten before it, a factor, a mask",
    )


def _answer(
    facts: RunFacts,
    exact_of: Callable[[RunFacts, _Prediction], Exact | Left],
    *,
    id_: str,
    title: str,
    remedy: str,
) -> Answer:
    failures: list[Failure] = []
    left: Counter[str] = Counter()
    exercised = 0
    for rank in facts.ranks:
        for prediction in _predictions(facts, rank):
            one = prediction if isinstance(prediction, Left) else exact_of(facts, prediction)
            if isinstance(one, Left):
                left[one.why] += 1
                continue
            judged = against(facts, rank, one)
            if isinstance(judged, Left):
                left[judged.why] += 1
                continue
            exercised += 1
            if judged is not None:
                failures.append(judged)
    skipped = "; ".join(f"{count} microbatches {why}" for why, count in left.items())
    return Answer(
        exercised=exercised,
        findings=findings_of(failures, id=id_, title=title, remedy=remedy),
        failed=len(failures),
        skipped=skipped or ("" if exercised else "no microbatch has labels, logits and token losses"),
    )


def _predictions(facts: RunFacts, rank: int) -> Iterator[_Prediction | Left]:
    if not facts.config.get("transformer_config"):
        return
    calls = calls_of(facts, rank)
    for model in calls.values():
        record, labels = model.outputs.get("0"), model.inputs.get("labels")
        if model.fqn or labels is None or record is None or record.shape != labels.shape:
            continue
        heads = [
            one
            for one in calls.values()
            if one.fqn == "output_layer" and (one.step, one.microbatch) == (model.step, model.microbatch)
        ]
        if len(heads) != 1:
            yield Left(what="", why="with several predictions (multi-token)" if heads else "without logits")
        else:
            yield _prediction(facts, model, heads[0])


def _prediction(facts: RunFacts, model: ModuleCall, head: ModuleCall) -> _Prediction | Left:
    where = facts.ranks[head.rank].coordinates
    alike = [r for r in facts.ranks if tensor_group(facts.ranks[r].coordinates) == tensor_group(where)]
    alike.sort(key=lambda number: facts.ranks[number].coordinates.tp_rank)
    outputs = [calls_of(facts, number)[head.moment].outputs.get("0") for number in alike
               if head.moment in calls_of(facts, number)]  # fmt: skip
    labels = elements(facts, model.rank, model.inputs["labels"])
    if labels is None or len(outputs) != where.tp_size or outputs[0] is None:
        return Left(what="", why="without labels, or without the logits of every rank")
    if outputs[0].numel * where.tp_size > _MOST:
        return Left(what="", why="of too many logits")
    shards = [elements(facts, number, record) for number, record in zip(alike, outputs, strict=True)]
    if any(shard is None or shard.ndim != 3 for shard in shards):
        return Left(what="", why="without elements of logits, or not finite ones")
    kept: Sequence[Vector] = [shard for shard in shards if shard is not None]
    mine = alike.index(head.rank)
    if kept[0].shape[:2] != labels.T.shape:
        return Left(what="", why="whose logits are not [s, b, v]")
    gathered = bool(head.values.get("gather_output"))
    logits = kept[mine] if gathered else np.concatenate(kept, axis=-1)
    if not 0 <= labels.min() <= labels.max() < logits.shape[-1]:
        return Left(what="", why="with labels outside the vocabulary")
    return _Prediction(
        model=model,
        head=head,
        logits=logits,
        labels=labels.T.astype(np.int64),
        first=0 if gathered else sum(shard.shape[-1] for shard in kept[:mine]),
    )


def _softmax(one: _Prediction) -> tuple[Vector, Vector, Vector]:
    """Return probabilities, log of the sum of powers, and the largest size of a row's logits."""
    top = one.logits.max(axis=-1, keepdims=True)
    powers = np.exp(one.logits - top)
    total = powers.sum(axis=-1, keepdims=True)
    spread = np.abs(one.logits).max(axis=-1, keepdims=True)
    return powers / total, top + np.log(total), spread


def _exact_losses(facts: RunFacts, one: _Prediction) -> Exact | Left:
    record = one.model.outputs["0"]
    _, log, spread = _softmax(one)
    chosen = np.take_along_axis(one.logits, one.labels[..., None], axis=-1)
    exact = (log - chosen)[..., 0].T
    share = summed(facts, one.logits.shape[-1]) + 8 * roundoff("float32")
    allowed = share * (1 + 2 * spread[..., 0].T) + 2 * roundoff(record.dtype) * np.abs(exact)
    return Exact(record=record, numbers=exact, allowed=allowed, of="logits and labels")


def _exact_gradient(facts: RunFacts, one: _Prediction) -> Exact | Left:
    record: TensorRecord | None = one.head.grad_outputs.get("0")
    arrived = elements(facts, one.model.rank, one.model.grad_outputs.get("0"))
    if record is None or arrived is None:
        return Left(what="", why="without elements of the gradients of logits and token losses")
    probabilities, _, spread = _softmax(one)
    each = arrived.T[..., None]
    exact = probabilities.copy()
    np.put_along_axis(
        exact, one.labels[..., None], np.take_along_axis(exact, one.labels[..., None], axis=-1) - 1, axis=-1
    )
    share = summed(facts, one.logits.shape[-1]) + 8 * roundoff("float32") * (1 + spread)
    unit = roundoff(record.dtype)
    allowed = (share * (probabilities + (exact < 0)) + 4 * unit * np.abs(exact)) * np.abs(each)
    width = record.shape[-1]
    part = slice(one.first, one.first + width)
    return Exact(
        record=record,
        numbers=(exact * each)[..., part],
        allowed=allowed[..., part],
        of="the logits and the gradient of the token losses",
    )
