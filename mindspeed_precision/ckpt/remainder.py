"""Everything in a checkpoint that is no tensor: iteration, schedule, the optimizer's numbers, RNG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.ckpt.stored import Checkpoint
from mindspeed_precision.meanings import load_meanings
from mindspeed_precision.redaction import redact
from mindspeed_precision.verify.aliases import under_megatrons_names
from mindspeed_precision.verify.settings import Difference, RunSettings, differences, normal

_COUNTS = frozenset(
    {"iteration", "num_floating_point_operations_so_far", "tokens", "epoch_num", "step_num", "global_step"}
)
_SCHEDULE = ("opt_param_scheduler", "lr_scheduler")
_OPTIMIZER = "optimizer."
_RNG = "rng_state"
_SECTION = "megatron_args"
_OTHERWISE = frozenset({"vocab_size", "padded_vocab_size", "model_type"})
"""What means something else in another framework; rows of the vocabulary are compared as tensors."""

_GROUPED = "group_query_attention"
_SHORT = 48


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One value that differs.

    Attributes:
        name: dotted.
        one: of the baseline.
        two: of the candidate.
    """

    name: str
    one: Any
    two: Any

    @property
    def line(self) -> str:
        """It as one line."""
        one, two = (_shown(redact({self.name: value})[self.name]) for value in (self.one, self.two))
        return f"{self.name}: {one} in the baseline, {two} in the candidate"


@dataclass(frozen=True, kw_only=True)
class Remainder:
    """What was compared beside tensors, by kind.

    Attributes:
        counts: iteration and the like, ``(compared, different)``.
        schedule: of the schedule of learning rate and weight decay.
        optimizer: of the groups' numbers and the count of steps.
        rng: of random states.
        other: of anything else.
        alone: names that one side has and the other has not.
    """

    counts: tuple[int, list[Entry]]
    schedule: tuple[int, list[Entry]]
    optimizer: tuple[int, list[Entry]]
    rng: tuple[int, list[Entry]]
    other: tuple[int, list[Entry]]
    alone: tuple[str, ...]


def remainder(one: Checkpoint, two: Checkpoint) -> Remainder:
    """Compare everything that is no tensor and no argument, by name."""
    left, right = dict(_flat(_tidied(one.rest))), dict(_flat(_tidied(two.rest)))
    kinds: dict[str, tuple[int, list[Entry]]] = {}
    for kind in ("counts", "schedule", "optimizer", "rng", "other"):
        names = [name for name in left if name in right and _kind(name) == kind]
        apart = [
            Entry(name=n, one=left[n], two=right[n]) for n in names if normal(left[n]) != normal(right[n])
        ]
        kinds[kind] = len(names), apart
    tops = [sorted({name.partition(".")[0] for name in side}) for side in (left, right)]
    alone = [f"{name} (baseline)" for name in tops[0] if name not in tops[1]]
    alone += [f"{name} (candidate)" for name in tops[1] if name not in tops[0]]
    return Remainder(**kinds, alone=tuple(alone))


def _tidied(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was saved under names that both of Megatron's formats give it."""
    found: dict[str, Any] = {}
    for name, value in rest.items():
        top = name.partition("/")[0]
        if top == _RNG:  # the first rank's: the formats keep different lists of ranks
            found.setdefault(_RNG, _first(value))
        else:
            found[name] = value
    return found


def _first(value: Any) -> Any:
    while isinstance(value, list) and value and isinstance(value[0], (list, dict)):
        value = value[0]
    return value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _kind(name: str) -> str:
    top = name.partition(".")[0]
    if top in _COUNTS:
        return "counts"
    if top in _SCHEDULE:
        return "schedule"
    if top == _RNG:
        return "rng"
    return "optimizer" if name.startswith(("optimizer.", "optimizer[")) else "other"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


@dataclass(frozen=True, kw_only=True)
class Configurations:
    """The configurations of two checkpoints.

    Attributes:
        compared: how many names both give a value.
        apart: those that differ.
        alone: how many one side alone has.
    """

    compared: int
    apart: list[Difference]
    alone: int


def configurations(one: Checkpoint, two: Checkpoint) -> Configurations:
    """Compare the configurations by Megatron's names; what one side alone says is counted."""
    left, right = _under_megatrons_names(one), _under_megatrons_names(two)
    both = [name for name in left if name in right]
    if one.family != two.family:
        both = [name for name in both if name not in _OTHERWISE]
    if left.get(_GROUPED) is False and right.get(_GROUPED) is False:
        both = [name for name in both if name != "num_query_groups"]  # nobody reads it then
    sides = [RunSettings(sections={_SECTION: {n: side[n] for n in both}}) for side in (left, right)]
    compared, apart = differences(*sides) if both else (0, [])
    return Configurations(
        compared=compared, apart=apart, alone=len(left.keys() ^ right.keys()) if both else 0
    )


def _under_megatrons_names(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    found, _ = under_megatrons_names(config, frozenset(load_meanings().arguments))
    if checkpoint.family in ("megatron", "run"):
        found = {**found, **{name: v for name, v in config.items() if v is not None or name not in found}}
    secret: dict[str, Any] = redact(found)  # two secrets can still be told apart
    return secret


__all__ = ["Configurations", "Entry", "Remainder", "configurations", "remainder"]
