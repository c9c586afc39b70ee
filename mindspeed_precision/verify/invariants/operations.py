"""What modules give is what their inputs and parameters give in float64: forward, and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from mindspeed_precision.verify.failures import Failure, failure, findings_of
from mindspeed_precision.verify.invariants.registry import invariant
from mindspeed_precision.verify.partial import Partial
from mindspeed_precision.verify.recomputation.attention import attention
from mindspeed_precision.verify.recomputation.embedding import embedding_gradients, embeddings
from mindspeed_precision.verify.recomputation.exact import Exact, Left
from mindspeed_precision.verify.recomputation.judging import against
from mindspeed_precision.verify.recomputation.linear import Product, products
from mindspeed_precision.verify.recomputation.pointwise import activations, norms, rotary, rotary_tables
from mindspeed_precision.verify.registry import Answer
from mindspeed_precision.verify.run_facts import RunFacts
from mindspeed_precision.verify.spans import each_replica

_Result = Exact | Product | Left
_NEEDS = "elements of what modules receive and give, and of parameters (capture.level=tensor)"


def _one_place(findings: Sequence[Partial], exercised: int, failed: int) -> tuple[Sequence[Partial], int]:
    """Keep one of several kinds that begin at one place."""
    return findings[:1] if len({one.where for one in findings}) == 1 else findings, failed


@invariant(
    "fprop.not_of_its_inputs",
    holds="a linear, norm, embedding, activation, rotation or attention gives what its inputs make, computed "
    "in float64, but for rounding",
    unit="calls",
    span=[each_replica()],
    settle=_one_place,
)
def forward(facts: RunFacts) -> Answer:
    """Compute what modules gave anew."""
    kinds: list[Callable[[RunFacts, int], Iterable[_Result]]] = [
        embeddings,
        norms,
        lambda f, rank: products(f, rank, backward=False),
        rotary_tables,
        rotary,
        lambda f, rank: attention(f, rank, backward=False),
        activations,
    ]
    return _answer(
        facts,
        (one for rank in facts.ranks for kind in kinds for one in _ranked(facts, rank, kind)),
        id_="fprop.not_of_its_inputs",
        title="the output is not what the inputs and parameters give",
        remedy="this operation, or what is between the two records: its kernel, strides that it takes for "
        "dense, a mask, a scale or an approximation that is not the configuration's, an operand that was "
        "overwritten; recompute it from the kept operands",
    )


@invariant(
    "dgrad.not_of_its_inputs",
    holds="a linear or attention sends back what the gradient that it got makes in float64, but for rounding",
    unit="gradients",
    span=[each_replica()],
    settle=_one_place,
)
def backward(facts: RunFacts) -> Answer:
    """Compute gradients of inputs anew."""
    kinds: list[Callable[[RunFacts, int], Iterable[_Result]]] = [
        lambda f, rank: products(f, rank, backward=True),
        lambda f, rank: attention(f, rank, backward=True),
    ]
    return _answer(
        facts,
        (one for rank in facts.ranks for kind in kinds for one in _ranked(facts, rank, kind)),
        id_="dgrad.not_of_its_inputs",
        title="the gradient of the input is not what the gradient of the output gives",
        remedy="the backward of this operation: its kernel, strides that it takes for dense, a factor, a "
        "reduction over the tensor-parallel group that is missing or done twice",
    )


@invariant(
    "wgrad.not_of_its_tokens",
    holds="dW of a word embedding is the sum of the gradients of each token, and of a tied output layer",
    unit="gradients",
    span=[each_replica()],
    settle=_one_place,
)
def of_embeddings(facts: RunFacts) -> Answer:
    """Add the gradients of the tokens up anew."""
    return _answer(
        facts,
        (one for rank in facts.ranks for one in _ranked(facts, rank, embedding_gradients)),
        id_="wgrad.not_of_its_tokens",
        title="dW of the embedding is not the sum of the gradients of its tokens",
        remedy="the backward of the embedding, hooks on its weight, the scaling of gradients by frequency",
    )


def _ranked(
    facts: RunFacts, rank: int, kind: Callable[[RunFacts, int], Iterable[_Result]]
) -> Iterator[tuple[int, _Result]]:
    for one in kind(facts, rank):
        yield rank, one


def _answer(
    facts: RunFacts, results: Iterable[tuple[int, _Result]], *, id_: str, title: str, remedy: str
) -> Answer:
    failures: list[Failure] = []
    left: Counter[str] = Counter()
    exercised = 0
    for rank, one in results:
        if isinstance(one, Left):
            left[f"{one.what} {one.why}"] += 1
            continue
        judged = _judged(facts, rank, one)
        if isinstance(judged, Left):
            left[f"{judged.what} {judged.why}"] += 1
            continue
        exercised += 1
        if judged is not None:
            failures.append(judged)
    skipped = "; ".join(f"{count} {why}" for why, count in left.most_common())
    return Answer(
        exercised=exercised,
        findings=findings_of(failures, id=id_, title=title, remedy=remedy),
        failed=len(failures),
        skipped=skipped or ("" if exercised else f"it needs {_NEEDS}"),
    )


def _judged(facts: RunFacts, rank: int, one: Exact | Product) -> Failure | Left | None:
    """Return what is wrong with a record, or why it is not judged; None: it is right."""
    if isinstance(one, Exact):
        return against(facts, rank, one)
    if one.excess.ratio <= 1:
        return None
    text = (
        f"not the product of {one.of}: row {one.excess.row} leaves a residual of "
        f"{one.excess.relative:.2e} of its norm, {one.excess.ratio:.3g} times the bound on rounding"
    )
    factor = one.excess.factor
    return failure(one.record, rank, text, "" if factor is None else f"{factor:.4g} times the product")
