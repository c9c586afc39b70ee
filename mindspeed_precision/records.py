"""The types that cross a seam. READ THIS FIRST.

A training run turns live tensors into records; everything after the run is a function of records::

    capture ─ Site, tensor → record ─ RecordLine → dump ═ files ─ TensorRecord → align ─ Pair | Unmatched
                                                     → compare ─ Comparison → diagnose ─ Diagnosis → report

Every type is frozen and keyword-only, and none of them imports a framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

NO_MICROBATCH = -1
"""Microbatch of a record that belongs to the whole step (reduction, clipping, optimizer)."""

INIT_STEP = -1
"""Step of a record taken before the first step (initial parameters)."""

COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter",
        "reduce_scatter_tensor",
    }
)
"""Slots of what a collective is given and gives back; ``.index`` follows where it is several tensors."""


FUSED_DIFFERENCE = "difference of main_grad after and before a fused GEMM"
"""Note of a dW that never was a tensor of its own."""


PERSISTENT = "persistent"
"""Slot of the records of a buffer that a checkpoint holds."""


MOMENTUM = "momentum_buffer"
"""Slot of the momentum buffer of an optimizer without betas, whose role is that of exp_avg."""


SCHEDULE = "schedule"
"""Name of the records of the count of Megatron's schedule."""


class Phase(str, Enum):
    """When a tensor was seen, in the order in which one step goes through it."""

    INIT = "init"
    BATCH = "batch"
    FPROP = "fprop"
    LOSS = "loss"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    ACCUMULATE = "accumulate"
    REDUCE = "reduce"
    CLIP = "clip"
    OPTIMIZER = "optimizer"


class Role(str, Enum):
    """What a tensor is (design glossary: ``docs/glossary.md``)."""

    INPUT = "input"
    OUTPUT = "output"
    GRAD_OUTPUT = "grad_output"
    GRAD_INPUT = "grad_input"
    WEIGHT = "weight"
    BIAS = "bias"
    WGRAD = "wgrad"
    BGRAD = "bgrad"
    MAIN_GRAD = "main_grad"
    REDUCED_GRAD = "reduced_grad"
    PARAM = "param"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MASTER_PARAM = "master_param"
    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    BATCH = "batch"
    HYPERPARAMETER = "hyperparameter"
    """A number that the optimizer really used for one parameter; ``slot`` names it (lr, eps, …)."""
    BUFFER = "buffer"
    """What a module keeps beside its parameters; ``slot`` says whether a checkpoint holds it."""
    RNG = "rng"
    """State of a random generator; ``slot`` names the generator."""
    RESIDUAL = "residual"
    """What is left of a law that was checked while training, as one number; ``slot`` names the law."""


class Level(str, Enum):
    """How much is kept of a record; each level includes the ones before it."""

    FINGERPRINT = "fingerprint"
    STATISTICS = "statistics"
    SKETCH = "sketch"
    TENSOR = "tensor"

    @property
    def rank(self) -> int:
        """Position in the order fingerprint < statistics < sketch < tensor."""
        return _LEVEL_RANKS[self.value]

    def includes(self, other: Level) -> bool:
        """Tell whether what ``other`` keeps is kept."""
        return self.rank >= other.rank


_LEVEL_RANKS = {level.value: rank for rank, level in enumerate(Level)}


@dataclass(frozen=True, kw_only=True, order=True)
class RecordKey:
    """Identity of a record within one rank; two runs are matched on it.

    Attributes:
        step: 0-based training step, or ``INIT_STEP``.
        microbatch: 0-based microbatch of the step, or ``NO_MICROBATCH``.
        phase: when.
        fqn: canonical module path (global layer and expert numbers, no ``module.`` wrappers); of a
            parameter for records about parameters (``decoder.layers.0.mlp.linear_fc1.weight``), of a
            module for what modules receive and return, and for dW at the GEMM
            (``decoder.layers.0.mlp.linear_fc1``).
        role: what.
        slot: which one, where a role has several: an index or keyword of a module's inputs and outputs
            (``0``, ``attention_mask``), ``before``/``after`` of an accumulation, a hyperparameter's name.
        occurrence: nth call of the same fqn in one microbatch, 0-based. Recomputation is not counted.
        recomputed: seen while activations were recomputed inside the backward pass.
    """

    step: int
    microbatch: int = NO_MICROBATCH
    phase: Phase
    fqn: str
    role: Role
    slot: str = ""
    occurrence: int = 0
    recomputed: bool = False

    def describe(self) -> str:
        """Return the key as a short phrase for a person."""
        where = f"step {self.step}" if self.step != INIT_STEP else "before the first step"
        if self.microbatch != NO_MICROBATCH:
            where += f", microbatch {self.microbatch}"
        slot = f"[{self.slot}]" if self.slot else ""
        again = f" (call {self.occurrence})" if self.occurrence else ""
        redo = " (recomputed)" if self.recomputed else ""
        return f"{where}: {self.fqn or '(model)'} {self.role.value}{slot} in {self.phase.value}{again}{redo}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a tensor lay in memory when it was seen, before anybody copied it.

    Attributes:
        stride: elements between neighbours, per dimension.
        storage_offset: elements before the first one in its storage.
        contiguous: whether it is contiguous in C order.
        format: storage format where the device has several (NPU: ``ND``, ``FRACTAL_NZ``); else empty.
    """

    stride: tuple[int, ...]
    storage_offset: int = 0
    contiguous: bool = True
    format: str = ""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Moments of a tensor. Never called a fingerprint: they do not decide equality.

    Attributes:
        minimum: smallest finite element; NaN when there is none.
        maximum: largest finite element; NaN when there is none.
        mean: mean of the finite elements; NaN when there is none.
        l2_norm: Euclidean norm of the finite elements.
        zeros: number of elements equal to zero (either sign).
        nans: number of NaN.
        infs: number of infinities (either sign).
        exponents: histogram of the 8-bit exponent of the element as float32 (bin 0: zero and subnormal,
            bin 255: Inf and NaN); only bins that are not empty, ``{bin: count}``.
        counted: False where another tool gave the moments: zeros and exponents were not counted, and are 0.
    """

    minimum: float
    maximum: float
    mean: float
    l2_norm: float
    zeros: int
    nans: int
    infs: int
    exponents: Mapping[int, int] = field(default_factory=dict)
    counted: bool = True


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What another tool (msprobe) wrote about a tensor's elements, which says less than a ``Digest``.

    Attributes:
        maximum: largest element, exactly; NaN where one is NaN, infinite where one is; None: not written.
        minimum: smallest element, likewise.
        mean: mean, in the precision of ``roundoff``; None: not written.
        l2_norm: Euclidean norm, likewise.
        roundoff: bound on the relative error of mean and norm, by the type that they were summed and kept in.
        checksum: of the elements; empty for none.
        algorithm: how it was computed: equal checksums of one algorithm mean equal elements.
    """

    maximum: float | None = None
    minimum: float | None = None
    mean: float | None = None
    l2_norm: float | None = None
    roundoff: float = 0.0
    checksum: str = ""
    algorithm: str = ""

    @property
    def nonfinite(self) -> bool:
        """Whether an element is NaN or infinite: then mean and norm say nothing."""
        return any(value is not None and not math.isfinite(value) for value in (self.maximum, self.minimum))


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """256 numbers, linear in a tensor, that estimate how far two tensors are apart (``record.sketch``).

    Attributes:
        data: the numbers, five bytes each.
        roundoff: bound on the error of the numbers by rounding, relative to their norm.
    """

    data: bytes
    roundoff: float


@dataclass(frozen=True, kw_only=True)
class Digest:
    """What the record stage computed from a tensor's bits.

    Attributes:
        fingerprint: position-keyed 64-bit sum over the logical elements (``docs/dump-format.md``); equal
            for equal logical tensors whatever their strides.
        unordered: the same without positions; equal under any permutation of the elements.
        statistics: moments, or None when only the fingerprint was asked for.
        sketch: None where none was asked for, and of integers, of one element, and of numbers too large.
        exact: False for what was computed from the digests of others (a sum of partial sums, a product): its
            fingerprints are not known, and are 0.
    """

    fingerprint: int
    unordered: int
    statistics: Statistics | None = None
    sketch: Sketch | None = None
    exact: bool = True

    @property
    def finite(self) -> bool:
        """Whether no element is NaN or infinite, as far as statistics say."""
        return self.statistics is None or not (self.statistics.nans or self.statistics.infs)

    def same_bits(self, other: Digest) -> bool:
        """Tell whether both are of the same bits; what is not known is not the same."""
        return self.exact and other.exact and self.fingerprint == other.fingerprint


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which part of one dimension of a canonical tensor a rank holds.

    Attributes:
        dim: the dimension.
        blocks: ``(offset, length)`` along it, in the order in which the rank holds them; several where shards
            interleave (a gated MLP: each rank has a block of the gate and one of the other half).
    """

    dim: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def held(self) -> int:
        """How much of the dimension it is."""
        return sum(length for _, length in self.blocks)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the tensor that a rank holds sits in the canonical, unsharded one.

    Attributes:
        shape: canonical shape.
        splits: what the rank holds of the dimensions that are split, by dimension, ascending; none: all of
            it.
        partial: over which group the canonical tensor is the sum of what the ranks hold, in words; empty for
            none. Of a parameter it speaks of its gradient before that is reduced, and not of the
            data-parallel group.
        copy_of: name of the parameter of another pipeline stage that it is a copy of, kept equal; or empty.
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    partial: str = ""
    copy_of: str = ""

    @property
    def whole(self) -> bool:
        """Whether the rank holds every element of the canonical tensor, in its order."""
        return all(split.blocks == ((0, self.shape[split.dim]),) for split in self.splits)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what the rank holds."""
        held = {split.dim: split.held for split in self.splits}
        return tuple(held.get(dim, size) for dim, size in enumerate(self.shape))

    @property
    def local_numel(self) -> int:
        """Number of elements that the rank holds."""
        return math.prod(self.local_shape)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which elements of a canonical tensor a tensor holds.

    Attributes:
        placement: of the tensor on this rank.
        start: first element, in C order, of what the rank holds.
        stop: one beyond the last; the ranges of a distributed optimizer are shorter than what the rank holds.
    """

    placement: Placement
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it is the canonical tensor itself."""
        return self.placement.whole and (self.start, self.stop) == (0, self.placement.local_numel)


@dataclass(frozen=True, kw_only=True)
class Unplaced:
    """Why it is not known where an activation sits in the canonical one.

    Attributes:
        reason: in one phrase.
    """

    reason: str


Place = Placement | Unplaced
"""Of an activation: where it sits, or why that is not known."""


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One line of ``index.jsonl``.

    Attributes:
        seq: position in this rank's execution order, from 0.
        key: identity.
        shape: logical shape.
        dtype: framework-neutral name (``bfloat16``, ``float32``, ``int64``, ``float8_e4m3fn`` …).
        layout: strides as seen; None for a host number.
        digest: fingerprint, statistics and sketch.
        payload: file in the rank's directory that holds the elements under the key ``str(seq)``; or None.
        note: how the tensor came about, where it is not simply what the role says.
        part: the elements, in C order, of what the rank holds of the parameter ``key.fqn`` (or, of dW at a
            GEMM, of the module's weight or bias) that the record is of, ``(start, stop)``: its fingerprints
            and sketch then number them as the parameter's placement does. None: the record is numbered by
            itself, which for what is not split is the same.
        place: of what is no parameter: where it sits in the canonical tensor, whose numbers its elements then
            have, or why that is not known. None: nothing was said when it was recorded.
        summary: what another tool wrote, where the record is of a dump of another tool; else None.
    """

    seq: int
    key: RecordKey
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    digest: Digest
    payload: str | None = None
    note: str = ""
    part: tuple[int, int] | None = None
    place: Place | None = None
    summary: Summary | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def value(self) -> float | None:
        """The element of a one-element record that has statistics; NaN and infinities included."""
        statistics = self.digest.statistics
        if self.numel != 1 or statistics is None:
            return None
        if statistics.nans:
            return float("nan")
        if statistics.infs:
            return float("inf")
        return statistics.mean


@dataclass(frozen=True, kw_only=True)
class ParameterDeclaration:
    """A parameter that a rank holds, declared before the first step: what coverage is measured against.

    Attributes:
        fqn: canonical name.
        shape: shape of what this rank holds.
        dtype: framework-neutral name.
        trainable: whether it requires a gradient.
        tied_to: fqn of the parameter whose storage it shares; empty for the first name of a storage.
        placement: where it sits in the canonical tensor; None: not known.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    tied_to: str = ""
    placement: Placement | None = None


@dataclass(frozen=True, kw_only=True)
class RankCoordinates:
    """Where a rank sits in the parallel layout; sizes are those of the whole run."""

    rank: int = 0
    world_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    @property
    def splits_tensors(self) -> bool:
        """Whether a tensor of a module may be a part of the canonical one."""
        return max(self.tp_size, self.cp_size, self.ep_size) > 1

    def sizes(self) -> dict[str, int]:
        """Return the sizes alone: equal on all ranks of a run."""
        return {
            name: getattr(self, name)
            for name in ("world_size", "tp_size", "pp_size", "dp_size", "cp_size", "ep_size")
        }


class Verdict(str, Enum):
    """What a comparison says of one pair, and of two runs."""

    IDENTICAL = "identical"
    WITHIN_TOLERANCE = "within_tolerance"
    DIVERGED = "diverged"
    INCOMPARABLE = "incomparable"
    MISSING = "missing"


class Side(str, Enum):
    """Which run."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"

    @property
    def other(self) -> Side:
        """The other run."""
        return Side.CANDIDATE if self is Side.BASELINE else Side.BASELINE


@dataclass(frozen=True, kw_only=True)
class Addend:
    """What one side's record lacks by convention (a module's output without its bias), from a mapping file.

    Attributes:
        side: the run whose record lacks it.
        record: the record to add, along the last dimension; None: that run did not record it.
        reason: the convention, in one phrase.
    """

    side: Side
    record: TensorRecord | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same record of both runs.

    Attributes:
        rank: the rank of both.
        baseline: of the run to agree with.
        candidate: of the run that is examined.
        addend: what must be added to one side before the two are the same number; None: nothing.
        held_by: by side, the ranks that hold it, where the runs have different parallel layouts: ``rank`` is
            then a lane of the canonical model (``align.layout``).
    """

    rank: int
    baseline: TensorRecord
    candidate: TensorRecord
    addend: Addend | None = None
    held_by: Mapping[Side, tuple[int, ...]] = field(default_factory=dict)

    @property
    def bits_known(self) -> bool:
        """Whether it is known of both sides' bits whether they are the same."""
        return self.baseline.digest.exact and self.candidate.digest.exact

    @property
    def key(self) -> RecordKey:
        """Identity that both sides share."""
        return self.candidate.key


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """A record that only one run has.

    Attributes:
        side: the run that has it.
        rank: the rank that has it.
        record: the record.
        closest: up to three keys of the other run that resemble it, best first.
    """

    side: Side
    rank: int
    record: TensorRecord
    closest: tuple[RecordKey, ...] = ()

    @property
    def key(self) -> RecordKey:
        """Identity of the record."""
        return self.record.key


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A pair and what was found about it.

    Attributes:
        pair: the two records; or, with the verdict ``missing``, the one that has no partner although the
            other run should have it.
        verdict: the policy's answer; ``missing`` also for a pair whose elements the policy needs and
            nobody kept.
        metrics: named facts (``bitwise``, ``rel_frobenius``, ``max_abs_err``, ``max_ulp``,
            ``mismatched``, ``permutation`` …); only those that the records support.
        reason: why the verdict is not ``identical``, in one phrase.
    """

    pair: Pair | Unmatched
    verdict: Verdict
    metrics: Mapping[str, float | int | bool]
    reason: str = ""

    @property
    def key(self) -> RecordKey:
        """Identity of what was compared."""
        return self.pair.key

    @property
    def excused(self) -> bool:
        """Whether the pair cannot be compared because of a convention, or of routes that rounding decides."""
        pair = self.pair
        if self.verdict is Verdict.INCOMPARABLE and "rerouted" in self.metrics:
            return True
        if not isinstance(pair, Pair) or pair.addend is None or self.verdict is not Verdict.INCOMPARABLE:
            return False
        return (pair.baseline.shape, pair.baseline.dtype) == (pair.candidate.shape, pair.candidate.dtype)


@dataclass(frozen=True, kw_only=True)
class ReplicasDiffer:
    """A tensor of which several ranks hold a copy, and the copies differ.

    Attributes:
        key: the record.
        side: the run.
        ranks: the ranks, grouped by the bits that they hold.
    """

    key: RecordKey
    side: Side
    ranks: tuple[tuple[int, ...], ...]


class Severity(str, Enum):
    """How bad a finding is; ``error`` makes the exit status 1."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, kw_only=True)
class ReplayRecipe:
    """One way to compute a record from what it was computed of, and what it gave.

    Attributes:
        recipe: the expression, as a person would write it.
        baseline_mismatched: elements of the baseline's record that it does not reproduce bit for bit.
        candidate_mismatched: the same for the candidate's record.
        recorded_for: the sides whose recorded layouts say that this is what they computed.
    """

    recipe: str
    baseline_mismatched: int
    candidate_mismatched: int
    recorded_for: tuple[Side, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One record (dW of a GEMM, a sum of gradients, a gradient that was moved), recomputed.

    Attributes:
        key: the record.
        rank: the rank whose operands were taken.
        elements: number of its elements.
        recipes: what each way of computing it gave.
        baseline_error: relative Frobenius distance of the baseline's record to the same operation in float64.
        candidate_error: the same for the candidate's.
        environment: what it ran on (framework, threads, kernels).
        proved: one recipe gives the baseline bit for bit, another the candidate, and each is what the
            recorded layouts say of that side.
        complete: every recipe speaks of every element; else some of what it reads was not recorded.
    """

    key: RecordKey
    rank: int
    elements: int
    recipes: tuple[ReplayRecipe, ...]
    baseline_error: float
    candidate_error: float
    environment: str
    proved: bool
    complete: bool = True


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause, or something wrong that needs no second run (ids: ``docs/findings.md``).

    Attributes:
        id: stable dotted id, ``wgrad.operand_layout``.
        severity: how bad.
        confidence: 0 to 1, how sure the rule is that this is a cause.
        title: one sentence.
        evidence: facts, one per line.
        remedy: what to change, as a command or a setting where there is one.
        proved_by_replay: the operation was rerun from captured operands and gave both sides bit for bit.
        where: the record that it concerns, where there is one.
        explains: keys of the origins that it accounts for.
        replay: what replay said, where it ran.
    """

    id: str
    severity: Severity
    confidence: float
    title: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    proved_by_replay: bool = False
    where: RecordKey | None = None
    explains: tuple[RecordKey, ...] = ()
    replay: Replay | None = None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A record that diverges while nothing it consumed does, or that shows a fault of its own beside that.

    Attributes:
        comparison: the comparison on the first such rank.
        ranks: all ranks on which this key is an origin, ascending.
        propagated: number of later divergent records that its divergence explains.
        inputs: what it consumed and how that compares, in one phrase.
        own: where what it consumed diverges, too: by what it shows a fault of its own; else empty.
        held_by: the candidate's ranks that hold it, where the runs have different parallel layouts.
    """

    comparison: Comparison
    ranks: tuple[int, ...]
    propagated: int = 0
    inputs: str = ""
    own: str = ""
    held_by: tuple[int, ...] = ()

    @property
    def key(self) -> RecordKey:
        """Identity of the record."""
        return self.comparison.key


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What was looked at. Absent data must never look like agreement.

    Attributes:
        parameters: trainable parameters, over all ranks, by canonical name.
        parameters_with_wgrad: of those, how many had dW in every microbatch of every compared step.
        records: records of the candidate in the compared steps.
        matched: of those, how many had a partner.
        unmatched: records of either run without a partner.
    """

    parameters: int
    parameters_with_wgrad: int
    records: int
    matched: int
    unmatched: int


@dataclass(frozen=True, kw_only=True)
class StepScalars:
    """What a user reads in the log of one step: loss and grad norm of both runs (None: not recorded).

    Attributes:
        step: which.
        baseline_loss: of the baseline.
        candidate_loss: of the candidate.
        baseline_grad_norm: of the baseline.
        candidate_grad_norm: of the candidate.
        tolerated: ``loss`` and ``grad_norm``, where they differ by no more than the policy allows.
    """

    step: int
    baseline_loss: float | None
    candidate_loss: float | None
    baseline_grad_norm: float | None
    candidate_grad_norm: float | None
    tolerated: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """How a second, short run of each side keeps the elements that a proof needs (``compare --refine``).

    Attributes:
        settings: for ``--precision-debug-config``, as plain data; what both runs must repeat is in it.
        overrides: by side, settings that its first run had and the other had not, as ``key=value``.
        stop_after: the divergent step, after which nothing is needed.
        records: records whose elements are kept, in the run that keeps more bytes.
        payload_bytes: of those elements.
        bytes: what that run is expected to write in all.
        wanted: whether elements may prove, or tell, what is not known yet.
    """

    settings: Mapping[str, Any]
    overrides: Mapping[Side, tuple[str, ...]]
    stop_after: int
    records: int
    payload_bytes: int
    bytes: int
    wanted: bool


class Judgement(str, Enum):
    """What a criterion says of a record, or of a run, from what was recorded."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What another policy says of the same comparisons, beside the one that decided.

    Attributes:
        policy: its name.
        title: what it demands, in one phrase.
        records: how many records passed, failed, and could not be decided for want of elements.
        first_failed: the earliest record that fails; None: none does.
        reason: why that one fails.
        loss: what it says of the losses of the run.
        loss_error: mean over the steps of the loss's relative error; None: no step has both losses.
        loss_limit: the largest that is accepted; None: the policy sets none.
    """

    policy: str
    title: str
    records: Mapping[Judgement, int]
    first_failed: RecordKey | None = None
    reason: str = ""
    loss: Judgement = Judgement.UNDECIDED
    loss_error: float | None = None
    loss_limit: float | None = None

    @property
    def status(self) -> Judgement:
        """Failed where anything fails; passed only where all was decided."""
        seen = {self.loss, *(judgement for judgement, number in self.records.items() if number)}
        if Judgement.FAILED in seen:
            return Judgement.FAILED
        exercised = self.records.get(Judgement.PASSED, 0) > 0
        return Judgement.PASSED if exercised and seen == {Judgement.PASSED} else Judgement.UNDECIDED


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The answer: what ``verdict.json``, the console and the report are made from.

    Attributes:
        status: the verdict on the two runs.
        baseline: path of the baseline run.
        candidate: path of the candidate run.
        origins: every origin, first divergence first.
        findings: causes and other findings, most likely first.
        coverage: what was looked at.
        scalars: loss and grad norm by step.
        steps: compared steps, ascending.
        diverged: number of divergent pairs.
        notes: what the reader must know about this answer (steps left out, ranks missing …).
        unmatched: records without a partner.
        policy: name of the policy and what it demands, in one phrase.
        decided: how many comparisons got which verdict.
        refinement: how a second pass is made; None where nothing diverged, or no element is missing.
        acceptance: what Ascend's acceptance criterion says of the same comparisons.
        comparisons: every comparison, in execution order.
    """

    status: Verdict
    baseline: str
    candidate: str
    origins: tuple[Origin, ...]
    findings: tuple[Finding, ...]
    coverage: Coverage
    scalars: tuple[StepScalars, ...]
    steps: tuple[int, ...]
    diverged: int
    notes: tuple[str, ...] = ()
    unmatched: tuple[Unmatched, ...] = ()
    policy: str = ""
    decided: Mapping[Verdict, int] = field(default_factory=dict)
    refinement: Refinement | None = None
    acceptance: Acceptance | None = None
    comparisons: tuple[Comparison, ...] = field(default=(), compare=False, repr=False)

    @property
    def compared(self) -> int:
        """How many records were compared, those of ranks for which others stand among them."""
        return sum(self.decided.values()) or len(self.comparisons)

    @property
    def first_divergence(self) -> Origin | None:
        """The earliest origin, or None."""
        return self.origins[0] if self.origins else None


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """What one check looked at, and what it found: a check that exercised nothing never looks like agreement.

    Attributes:
        name: stable dotted name, mostly the id of the finding that it gives (``reduce.not_the_sum``).
        holds: what must hold, in one sentence.
        exercised: how many things it looked at.
        unit: what these are, in the plural (``parameters``, ``records``, ``arguments``).
        failed: how many of them broke it.
        skipped: why it looked at nothing, or at less than there is; empty where it looked at all.
        applies: False where this run has nothing of the kind (one rank has no replicas): then that is no gap.
    """

    name: str
    holds: str
    exercised: int
    unit: str
    failed: int = 0
    skipped: str = ""
    applies: bool = True


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The answer of a command that needs no comparison of every record: check, verify, preflight, certify.

    Attributes:
        command: which.
        subjects: what was examined, by what it is called (``{"run": "runs/a"}``).
        findings: what is wrong, worst first.
        outcomes: what was looked at.
        notes: what the reader must know about this answer.
        headline: the answer in one sentence; empty: made from the findings and outcomes.
        tables: further text to show, by title, line by line.
    """

    command: str
    subjects: Mapping[str, str]
    findings: tuple[Finding, ...]
    outcomes: tuple[CheckOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    headline: str = ""
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def vacuous(self) -> bool:
        """Whether nothing was looked at."""
        return not any(outcome.exercised for outcome in self.outcomes)
