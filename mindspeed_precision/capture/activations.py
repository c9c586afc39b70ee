"""Where each activation of this rank sits in the canonical one, by the rule of its module.

Nothing is communicated: a dimension that is split over a group is as many times as long as the group is
large. Of a sequence that is split over the context-parallel group a rank has two chunks, as Megatron cuts it
(``get_batch_on_this_cp_rank``): its own of the first half, and the one as far from the end. A tensor that is
not as its rule says is not placed, and so is one without a rule: a missing rule is said, a wrong one would be
a wrong verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_precision.backends.base import PlacingBackend
from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.capture.layout_rules import KEYS, ROUTED, TOKENS, Dimension, Form, LayoutRule
from mindspeed_precision.capture.names import Names
from mindspeed_precision.capture.placement import expert_tensor_group
from mindspeed_precision.record.placement import CONTEXT_GROUP, TENSOR_GROUP, joined, summed_over
from mindspeed_precision.records import (
    COLLECTIVES,
    Phase,
    Place,
    Placement,
    RankCoordinates,
    RecordKey,
    Role,
    Split,
    Unplaced,
)

_OF_MODULES = frozenset({Phase.FPROP, Phase.DGRAD, Phase.WGRAD})
_OF_GEMM = frozenset({Role.INPUT, Role.GRAD_OUTPUT, Role.WGRAD, Role.BGRAD})
_COLLECTIVE = Unplaced(reason="no layout rule for what a collective is given and gives back")
_ZIGZAG = {"context_parallel_algo": "megatron_cp_algo", "cp_attention_mask_type": "causal"}
"""Settings of MindSpeed under which the sequence is cut as Megatron does; Megatron has none."""

_TIED = {"output_layer": "embedding.word_embeddings"}
"""Modules that may use another one's weight."""

_Kind = tuple[Phase, str, Role, str, tuple[int, ...], str]


class ActivationPlacer:
    """Places what modules receive and return, forward and backward, and the operands of dW's GEMM.

    Args:
        backend: the framework; one that cannot number a shard's elements places nothing.
        rules: the first one that fits a module counts.
        names: the modules of this rank.
        coordinates: of this rank; where no group splits anything, every tensor is canonical as it is.
        parameters: where its parameters sit.

    Attributes:
        active: it places something.
    """

    def __init__(
        self,
        *,
        backend: CaptureBackend,
        rules: Sequence[LayoutRule],
        names: Names,
        coordinates: RankCoordinates,
        parameters: Mapping[str, Placement | None],
    ) -> None:
        self.active = isinstance(backend, PlacingBackend) and coordinates.splits_tensors
        self._rules = rules
        self._modules = dict(names.modules)
        self._coordinates = coordinates
        self._parameters = parameters
        config = getattr(names.roots[0], "config", None) if names.roots else None
        self._sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        self._other_cut = coordinates.cp_size > 1 and any(
            getattr(config, name, value) != value for name, value in _ZIGZAG.items()
        )
        self._uneven = getattr(config, "moe_expert_capacity_factor", None) is not None
        self._known: dict[_Kind, Place] = {}
        self._rule_of: dict[str, LayoutRule | None] = {}

    def place(self, key: RecordKey, shape: tuple[int, ...], dtype: str) -> Place | None:
        """Return where a tensor sits, or why that is not known; None: nothing has to be said.

        Args:
            key: of the record.
            shape: of what this rank holds.
            dtype: framework-neutral name.
        """
        if not self.active or key.phase not in _OF_MODULES:
            return None
        kind = (key.phase, key.fqn, key.role, key.slot, shape, dtype)
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = self._place(key, shape, dtype)
        return known

    def _place(self, key: RecordKey, shape: tuple[int, ...], dtype: str) -> Place:
        if key.slot.partition(".")[0] in COLLECTIVES:
            return _COLLECTIVE
        what = f"{key.role.value}[{key.slot}]" if key.slot else key.role.value
        module = self._modules.get(key.fqn)
        if module is None:
            return Unplaced(reason=f"no layout rule for {what} of {key.fqn}, which is no module")
        kind = type(module).__name__
        rule = self._rule(key.fqn, module)
        form = None if rule is None else rule.form(*_where(key))
        if form is None:
            reason = (
                rule.unknown if rule is not None and rule.unknown else f"no layout rule for {what} of {kind}"
            )
            return Unplaced(reason=reason)
        if dtype.startswith("complex"):
            return Unplaced(reason=f"no layout rule for {dtype}")
        if reason := self._not_told(form):
            return Unplaced(reason=f"no layout rule for {what} of {kind}{reason}")
        placed = self._placed(form, shape, key.fqn)
        if placed is not None and self._coordinates.cp_size > 1 and _sums_tokens(key, form):
            placed = summed_over(placed, CONTEXT_GROUP)
        return placed or Unplaced(reason=f"{what} of {kind} is not as its layout rule says ({form.text})")

    def _not_told(self, form: Form) -> str:
        """Say in which case the rules do not tell how a tensor is split, as of this run; or empty."""
        names = None if form.dimensions is None else {dimension.name for dimension in form.dimensions}
        if names is not None and ROUTED in names and self._uneven:
            return " where tokens are dropped or padded by rank"
        if self._coordinates.cp_size == 1:
            return ""
        under = " under context parallelism: "
        if names is None:
            return f"{under}its dimensions are not named"
        if KEYS in names or ROUTED in names:
            return (
                f"{under}{'keys' if KEYS in names else 'tokens of an expert'} come in an order of their own"
            )
        if names & set(TOKENS) and self._other_cut:
            return f"{under}the sequence is not cut as Megatron does"
        return ""

    def _rule(self, fqn: str, module: Any) -> LayoutRule | None:
        if fqn not in self._rule_of:
            self._rule_of[fqn] = next((rule for rule in self._rules if rule.fits(fqn, module)), None)
        return self._rule_of[fqn]

    def _placed(self, form: Form, shape: tuple[int, ...], fqn: str) -> Placement | None:
        """Return the placement of a tensor; None where it is not as its rule says."""
        terms = self._group(form.summed)[0] if form.summed else 1
        if terms not in (1, self._coordinates.tp_size):
            return None  # which rank has which term is known of the whole tensor-parallel group alone
        partial = TENSOR_GROUP if terms > 1 else ""
        if form.dimensions is None:
            return Placement(shape=shape, partial=partial)
        if len(form.dimensions) != len(shape):
            return None
        canonical, splits = list(shape), []
        for dim, (dimension, length) in enumerate(zip(form.dimensions, shape, strict=True)):
            found = self._split(dimension, dim, length, fqn)
            if found is None:
                return None
            canonical[dim], split = found
            if split is not None:
                splits.append(split)
        return Placement(shape=tuple(canonical), splits=tuple(splits), partial=partial)

    def _split(
        self, dimension: Dimension, dim: int, length: int, fqn: str
    ) -> tuple[int, Split | None] | None:
        """Return the canonical length of a dimension and what is held of it; None: it does not fit."""
        if dimension.weight is not None:
            return self._as_weight(fqn, dimension.weight, dim, length)
        size, rank = self._group(dimension.group)
        contexts, context = self._contexts(dimension)
        if size * contexts == 1 or not length:
            return length, None
        if contexts == 1:
            return length * size, Split(dim=dim, blocks=((rank * length, length),))
        if length * size % 2:
            return None
        chunk = length * size // 2
        starts = context * chunk, (2 * contexts - 1 - context) * chunk
        blocks = [
            (start + max(first - begin, 0), min(last - begin, chunk) - max(first - begin, 0))
            for begin, start in zip((0, chunk), starts, strict=True)
            for first, last in [(rank * length, (rank + 1) * length)]
            if first < begin + chunk and last > begin
        ]
        return length * size * contexts, Split(dim=dim, blocks=joined(blocks))

    def _contexts(self, dimension: Dimension) -> tuple[int, int]:
        """Return size and rank of the context-parallel group; 1 and 0 for what it does not split."""
        tokens = dimension.name in TOKENS
        return (self._coordinates.cp_size, self._coordinates.cp_rank) if tokens else (1, 0)

    def _as_weight(self, fqn: str, weight_dim: int, dim: int, length: int) -> tuple[int, Split | None] | None:
        name = f"{fqn}.weight"
        if name not in self._parameters:
            name = f"{_TIED.get(fqn, fqn)}.weight"
        placement = self._parameters.get(name)
        if placement is None or weight_dim >= len(placement.shape):
            return None
        split = next((split for split in placement.splits if split.dim == weight_dim), None)
        if placement.local_shape[weight_dim] != length:
            return None
        return placement.shape[weight_dim], None if split is None else Split(dim=dim, blocks=split.blocks)

    def _group(self, name: str) -> tuple[int, int]:
        """Return size and rank of a group; 1 and 0 for one that splits nothing in this run."""
        if name == "tp" or (name == "sp" and self._sequence_parallel):
            return self._coordinates.tp_size, self._coordinates.tp_rank
        return expert_tensor_group(self._coordinates) if name == "etp" else (1, 0)


def _sums_tokens(key: RecordKey, form: Form) -> bool:
    """Tell whether a tensor is a sum over tokens: a gradient of what has none of their dimensions."""
    tokens = any(dimension.name in TOKENS for dimension in form.dimensions or ())
    return not tokens and (key.phase is Phase.DGRAD or key.role in (Role.WGRAD, Role.BGRAD))


def _where(key: RecordKey) -> tuple[str, str]:
    """Return role and slot of a record as rules name them."""
    if key.phase is Phase.WGRAD and key.role in _OF_GEMM:
        return "gemm", key.role.value
    return key.role.value, key.slot
