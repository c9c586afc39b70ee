"""Which tensor of one checkpoint is which of the other, put together or apart as both need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_precision.align.mapping import Mapping as NameMapping
from mindspeed_precision.ckpt.conventions import by_group
from mindspeed_precision.ckpt.experts import unpacked
from mindspeed_precision.ckpt.naming import PARTS, Neighbours, place_of
from mindspeed_precision.ckpt.stored import Checkpoint, Geometry, Stored, joined
from mindspeed_precision.errors import CheckpointError
from mindspeed_precision.records import Placement, Side, Split

PARAMETER, LOOSE = "param", "as stored"
_WHOLE = {
    frozenset(parts) for parts in (("q", "k", "v"), ("gate", "up"), ("qkv",), ("",), ("q_down", "kv_down"))
}
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, kw_only=True)
class Matched:
    """One parameter, or one thing that the optimizer keeps of it, in both checkpoints.

    Attributes:
        name: megatron-core's; ``[q]`` behind it where both keep a part of it apart.
        role: ``param``, ``exp_avg``, ``exp_avg_sq``, ``master_param``; ``as stored`` for a tensor of the
            optimizer that is not known to be of a parameter, under its own name.
        one: of the baseline; None: it has none.
        two: of the candidate; likewise.
        note: how a side was put together; or why it could not be.
        failed: it could not be.
    """

    name: str
    role: str
    one: Stored | None
    two: Stored | None
    note: str = ""
    failed: bool = False


Parts = dict[str, dict[str, Stored]]


@dataclass(frozen=True, kw_only=True)
class Named:
    """A checkpoint under megatron-core's names.

    Attributes:
        checkpoint: what was read.
        roles: by role and name, the parts of a parameter.
        geometry: of the heads.
        unknown: how many names are in no table.
    """

    checkpoint: Checkpoint
    roles: Mapping[str, Parts]
    geometry: Geometry
    used: Mapping[str, int] = field(default_factory=dict)


def named(checkpoint: Checkpoint, mappings: Sequence[NameMapping]) -> Named:
    """Return a checkpoint under megatron-core's names.

    Raises:
        CheckpointError: two of its tensors become one.
    """
    roles: dict[str, Parts] = {PARAMETER: _placed(checkpoint, checkpoint.tensors, mappings)}
    for role, table in checkpoint.states.items():
        roles[role] = _placed(checkpoint, table, mappings)
    if checkpoint.loose:
        roles[LOOSE] = {name: {"": tensor} for name, tensor in checkpoint.loose.items()}
    return Named(checkpoint=checkpoint, roles=roles, geometry=checkpoint.geometry)


def _placed(checkpoint: Checkpoint, table: Mapping[str, Stored], mappings: Sequence[NameMapping]) -> Parts:
    found: Parts = {}
    around = Neighbours(table)
    for own, tensor in table.items():
        for one in unpacked(own, tensor, table):
            place = place_of(one.name if one is not tensor else own, mappings, around)
            parts = found.setdefault(place.name, {})
            if place.part in parts:
                raise CheckpointError(
                    "two tensors become one parameter",
                    where=checkpoint.path,
                    found=f"{parts[place.part].name} and {own} both as {place.name}",
                    remedy="say with --mapping what they are",
                )
            parts[place.part] = one
    return found


def matched(one: Named, two: Named) -> Iterator[Matched]:
    """Yield what either checkpoint has, the baseline's first, in its order.

    A parameter that both keep in the same parts is compared part by part; else it is put together.
    """
    geometry = shared_geometry(one, two)
    for role in dict.fromkeys([*one.roles, *two.roles]):
        left, right = one.roles.get(role, {}), two.roles.get(role, {})
        if role != PARAMETER and not (left and right):
            continue
        names = [name for name in left if name in right] if role == LOOSE else [*left, *right]
        for name in dict.fromkeys(names):
            yield from _of_name(name, role, left.get(name, {}), right.get(name, {}), geometry)


def shared_geometry(one: Named, two: Named) -> Geometry:
    """Return the heads, of whoever knows them."""
    return one.geometry if one.geometry.heads and one.geometry.groups else two.geometry


def _of_name(
    name: str, role: str, left: Mapping[str, Stored], right: Mapping[str, Stored], geometry: Geometry
) -> Iterator[Matched]:
    if left.keys() == right.keys() and "" not in left:
        for part in sorted(left, key=PARTS.index):
            yield Matched(name=f"{name}[{part}]", role=role, one=left[part], two=right[part])
        return
    sides, notes, failed = [], [], False
    for side, parts in zip(Side, (left, right), strict=True):
        try:
            tensor, note = _together(name, parts, geometry)
        except CheckpointError as error:
            tensor, note, failed = None, f"the {side.value}: {error}", True
        sides.append(tensor)
        notes += [note] if note else []
    yield Matched(name=name, role=role, one=sides[0], two=sides[1], note="; ".join(notes), failed=failed)


def _together(name: str, parts: Mapping[str, Stored], geometry: Geometry) -> tuple[Stored | None, str]:
    """Return a parameter in Megatron's order, of whatever parts a checkpoint has it in."""
    if not parts:
        return None, ""
    if frozenset(parts) not in _WHOLE:
        raise CheckpointError(
            "not all parts of a parameter, or some twice", found=", ".join(one.name for one in parts.values())
        )
    if "" in parts:
        return parts[""], ""
    ordered = [parts[part] for part in PARTS if part in parts]
    own = " + ".join(short(one.name) for one in ordered)
    if any(one.load is None for one in ordered):
        raise CheckpointError("parts of which no elements were kept", found=own)
    whole = _stacked(name, ordered)
    if not frozenset(parts) & {"q", "qkv"}:
        return whole, own
    rows = whole.shape[0]
    order = by_group(rows, geometry.heads, geometry.groups)
    fits = "q" not in parts or (
        geometry.heads and ordered[0].shape[0] * geometry.groups == ordered[1].shape[0] * geometry.heads
    )
    if order is None or not fits:
        return whole, f"{own}, in blocks: the number of heads is not known, or does not fit"
    return whole.changed(lambda bits: bits[order], whole.shape), own


def _stacked(name: str, ordered: Sequence[Stored]) -> Stored:
    """Put tensors one under another."""
    if len(ordered) == 1:
        return ordered[0]
    rest = {one.shape[1:] for one in ordered}
    if len(rest) != 1 or any(not one.shape for one in ordered):
        found = ", ".join(f"{short(one.name)} {list(one.shape)}" for one in ordered)
        raise CheckpointError("parts of several widths", found=found)
    shape = (sum(one.shape[0] for one in ordered), *ordered[0].shape[1:])
    pieces, first = [], 0
    for one in ordered:
        split = Split(dim=0, blocks=((first, one.shape[0]),))
        pieces.append((one, Placement(shape=shape, splits=(split,))))
        first += one.shape[0]
    source = ", ".join(dict.fromkeys(one.source for one in ordered))
    own = " + ".join(one.name for one in ordered)
    return joined(pieces, shape, name=own, source=source)


def short(name: str) -> str:
    """Return the last two parts of a name without ``weight``."""
    return ".".join(
        name.removesuffix(".weight").split(".")[-1:] if name.endswith(".weight") else name.split(".")[-2:]
    )


def tied(pair: Matched, one: Named, two: Named) -> Side | None:
    """Return which side keeps once what the other one has as a copy, of its embedding mostly; or None."""
    if not original_name(pair.name) or (pair.one is None) == (pair.two is None) or pair.failed:
        return None
    holder, side = (one, Side.CANDIDATE) if pair.one is not None else (two, Side.BASELINE)
    return side if original(holder, pair) is not None else None


def original_name(name: str) -> str:
    """Return what a parameter may be a copy of: the output layer, and what DeepSeek saves with MTP layers."""
    if name == _OUTPUT or name.endswith(".embed_tokens.weight"):
        return _EMBEDDING
    return _OUTPUT if name.endswith(".shared_head.head.weight") else ""


def original(side: Named, pair: Matched) -> Stored | None:
    """Return what a parameter of a checkpoint may be a copy of, or what the optimizer keeps of that."""
    return side.roles.get(pair.role, {}).get(original_name(pair.name), {}).get("")


def with_mappings(
    mappings: Iterable[NameMapping], one: Checkpoint, two: Checkpoint
) -> dict[Side, list[NameMapping]]:
    """Return by side the mapping files that speak of it: baseline, candidate, or the family of one of them.

    Raises:
        CheckpointError: one speaks of neither, or of both.
    """
    found: dict[Side, list[NameMapping]] = {side: [] for side in Side}
    families = {Side.BASELINE: one.family, Side.CANDIDATE: two.family}
    for mapping in mappings:
        fitting = [side for side in Side if mapping.side in (side.value, families[side])]
        if len(fitting) != 1:
            raise CheckpointError(
                "a mapping must speak of one of the two checkpoints",
                where=f"{mapping.where}: side",
                found=mapping.side,
                expected=f"baseline, candidate, or one of {', '.join(sorted(set(families.values())))}",
            )
        found[fitting[0]].append(mapping)
    return found


__all__ = [
    "LOOSE",
    "Matched",
    "Named",
    "matched",
    "named",
    "original",
    "shared_geometry",
    "tied",
    "with_mappings",
]
