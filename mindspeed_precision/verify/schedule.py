"""Learning rate, weight decay and batch size of every step, recomputed from Megatron's arguments.

The formulas are those of ``megatron.core.optimizer_param_scheduler.OptimizerParamScheduler`` (0.12 to 0.19),
of ``get_optimizer_param_scheduler`` in ``megatron.training.training``, which counts its steps in samples, and
of ``megatron.core.num_microbatches_calculator``. Step ``n`` (0-based) uses what the schedule gives after the
samples of the ``n`` steps before it; a step that the loss scale skips moves the consumed samples of the data
but not those of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_precision.errors import ConfigError

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_DECAY: Mapping[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
    "exponential": lambda ratio: 2.0 * math.pow(0.5, ratio) - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}
"""What is left of the learning rate above its minimum, of the share of the decay that is over."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate and weight decay as functions of the consumed samples.

    Attributes:
        init_lr: before the first sample, where there is a warm-up.
        max_lr: after the warm-up.
        min_lr: after the decay.
        warmup: samples of the linear warm-up (a fraction of one where it is given as a fraction).
        decay: samples after which the decay is over, warm-up included.
        style: ``constant``, ``linear``, ``cosine``, ``inverse-square-root`` or ``WSD``.
        wsd_decay: samples of the decay at the end, of WSD.
        wsd_style: ``linear``, ``cosine``, ``exponential`` or ``minus_sqrt``, of WSD.
        start_wd: weight decay of the first sample.
        end_wd: weight decay in the end.
        wd_samples: samples over which it grows.
        wd_style: ``constant``, ``linear`` or ``cosine``.
    """

    init_lr: float
    max_lr: float
    min_lr: float
    warmup: float
    decay: float
    style: str
    wsd_decay: float | None
    wsd_style: str | None
    start_wd: float
    end_wd: float
    wd_samples: float
    wd_style: str

    def lr(self, consumed: float, *, max_lr: float | None = None, min_lr: float | None = None) -> float:
        """Return the learning rate after ``consumed`` samples; of a group with limits of its own, by those.

        Raises:
            ConfigError: the style is not one of Megatron's.
        """
        high = self.max_lr if max_lr is None else max_lr
        low = self.min_lr if min_lr is None else min_lr
        if self.warmup > 0 and consumed <= self.warmup:
            return self.init_lr + (high - self.init_lr) * consumed / self.warmup
        if self.style == "constant":
            return high
        if consumed > self.decay:
            return low
        if self.style == "inverse-square-root":
            return max(low, high * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(consumed, 1)))
        return low + self._left(consumed) * (high - low)

    def _left(self, consumed: float) -> float:
        if self.style == "WSD":
            start = self.decay - (self.wsd_decay or 0)
            if consumed <= start:
                return 1.0
            return _decay(self.wsd_style, "lr_wsd_decay_style")((consumed - start) / (self.wsd_decay or 1))
        if self.style not in ("linear", "cosine"):
            raise _unknown("lr_decay_style", self.style, "constant, linear, cosine, inverse-square-root, WSD")
        return _DECAY[self.style]((consumed - self.warmup) / (self.decay - self.warmup))

    def weight_decay(self, consumed: float) -> float:
        """Return the weight decay after ``consumed`` samples, without a group's multiplier.

        Raises:
            ConfigError: the style is not one of Megatron's.
        """
        if consumed > self.wd_samples or self.wd_style == "constant":
            return self.end_wd
        ratio = consumed / self.wd_samples
        if self.wd_style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        elif self.wd_style != "linear":
            raise _unknown("weight_decay_incr_style", self.wd_style, "constant, linear, cosine")
        return self.start_wd + ratio * (self.end_wd - self.start_wd)


def _decay(style: str | None, argument: str) -> Callable[[float], float]:
    if style is None or style not in _DECAY:
        raise _unknown(argument, style, ", ".join(_DECAY))
    return _DECAY[style]


def _unknown(argument: str, found: object, expected: str) -> ConfigError:
    return ConfigError("no schedule of Megatron", where=argument, found=repr(found), expected=expected)


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Samples of a step, of the samples consumed before it.

    Attributes:
        final: global batch size after every change.
        ramp: of a ramp-up its first batch size, its increment, and the samples that it takes.
        stairs: of a step schedule ``(consumed samples from which it holds, batch size)``, ascending.
        multiple: a step's samples are rounded down to a multiple of it; 1: they are not.
    """

    final: int
    ramp: tuple[int, int, int] | None = None
    stairs: tuple[tuple[int, int], ...] = ()
    multiple: int = 1

    def at(self, consumed: int) -> int:
        """Return the samples of the step that begins after ``consumed`` samples."""
        size = self.final
        if self.ramp is not None and consumed <= self.ramp[2]:
            start, increment, samples = self.ramp
            each = samples / ((self.final - start) // increment)
            size = start + int(consumed / each) * increment
        for threshold, batch in self.stairs:
            size = batch if consumed >= threshold else size
        return size // self.multiple * self.multiple


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What Megatron's arguments say of every step, ``[train_iters]`` each; step ``n`` is entry ``n``.

    Attributes:
        batch_size: samples of the step, over all ranks.
        consumed: samples consumed before the step, where training began at step 0 and none was skipped.
        lr: learning rate of a group without limits of its own.
        weight_decay: of a group whose multiplier is 1.
    """

    batch_size: Sequence[int]
    consumed: Sequence[int]
    lr: Sequence[float]
    weight_decay: Sequence[float]


def schedule_of(arguments: Mapping[str, Any]) -> Schedule:
    """Return the schedule that ``get_optimizer_param_scheduler`` makes of Megatron's arguments.

    Raises:
        ConfigError: an argument that it needs is absent, or is none of Megatron's.
    """
    in_iters = bool(arguments.get("train_iters")) and not arguments.get("train_samples")
    unit, factor = ("iters", _number(arguments, "global_batch_size")) if in_iters else ("samples", 1.0)
    total = _number(arguments, f"train_{unit}") * factor
    decay = arguments.get(f"lr_decay_{unit}")
    decay_samples = total if decay is None else _optional(arguments, f"lr_decay_{unit}") * factor
    fraction = arguments.get("lr_warmup_fraction")
    wsd = arguments.get(f"lr_wsd_decay_{unit}")
    weight_decay = _optional(arguments, "weight_decay", 0.01)
    return Schedule(
        init_lr=_optional(arguments, "lr_warmup_init"),
        max_lr=_number(arguments, "lr"),
        min_lr=_optional(arguments, "min_lr"),
        warmup=_optional(arguments, f"lr_warmup_{unit}") * factor
        if fraction is None
        else _optional(arguments, "lr_warmup_fraction") * decay_samples,
        decay=decay_samples,
        style=str(arguments.get("lr_decay_style", "linear")),
        wsd_decay=None if wsd is None else _optional(arguments, f"lr_wsd_decay_{unit}") * factor,
        wsd_style=arguments.get("lr_wsd_decay_style"),
        start_wd=_optional(arguments, "start_weight_decay", weight_decay),
        end_wd=_optional(arguments, "end_weight_decay", weight_decay),
        wd_samples=total,
        wd_style=str(arguments.get("weight_decay_incr_style", "constant")),
    )


def batch_sizes_of(arguments: Mapping[str, Any]) -> BatchSizes:
    """Return the batch sizes of every step.

    Megatron that knows ``step_batch_size_schedule`` (0.18) ignores ``rampup_batch_size``. Thresholds of the
    former are tokens.

    Raises:
        ConfigError: an argument that it needs is absent, or is none of Megatron's.
    """
    final = int(_number(arguments, "global_batch_size"))
    ranks = int(_optional(arguments, "data_parallel_size") or 1)
    whole = int(_optional(arguments, "micro_batch_size") or 1) * ranks
    multiple = whole if arguments.get("decrease_batch_size_if_needed") else 1
    if arguments.get("step_batch_size_schedule"):
        stairs = _stairs(str(arguments["step_batch_size_schedule"]), int(_number(arguments, "seq_length")))
        return BatchSizes(final=stairs[-1][1], stairs=stairs)
    ramp = arguments.get("rampup_batch_size")
    if not ramp or "step_batch_size_schedule" in arguments:
        return BatchSizes(final=final, multiple=multiple)
    return BatchSizes(final=final, ramp=_ramp(ramp, final), multiple=multiple)


def _ramp(ramp: Any, final: int) -> tuple[int, int, int]:
    try:
        start, increment, samples = (int(value) for value in ramp)
    except (TypeError, ValueError):
        start, increment, samples = 0, 0, 0
    if increment <= 0 or samples <= 0 or final <= start:
        expected = f"start (below {final}), increment, samples"
        raise ConfigError("no ramp-up", where="rampup_batch_size", found=repr(ramp), expected=expected)
    return start, increment, samples


def _stairs(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Read ``0:768 250B:1536``: tokens from which on a step has so many samples."""
    try:
        pairs = [entry.split(":", 1) for entry in text.replace(",", " ").split()]
        found = sorted((_count(one) // seq_length, _count(two)) for one, two in pairs)
    except ValueError as error:
        where = "step_batch_size_schedule"
        raise ConfigError("no schedule", where=where, found=repr(text), expected="0:768 250B:1536") from error
    if not found or found[0][0] != 0:
        raise ConfigError("does not begin at 0", where="step_batch_size_schedule", found=repr(text))
    return tuple(found)


def _count(text: str) -> int:
    factor = _SUFFIXES.get(text.strip()[-1:].upper(), 1)
    return int(float(text.strip()[:-1] if factor > 1 else text) * factor)


def curves_of(arguments: Mapping[str, Any]) -> Curves:
    """Return lr, weight decay, batch size and consumed samples of every step of the training.

    Raises:
        ConfigError: an argument that it needs is absent, or is none of Megatron's.
    """
    schedule, sizes = schedule_of(arguments), batch_sizes_of(arguments)
    consumed = 0
    batches: list[int] = []
    starts: list[int] = []
    steps = arguments.get("train_iters")
    samples = None if steps else int(_number(arguments, "train_samples"))
    while len(batches) < int(steps) if steps else consumed + sizes.at(consumed) <= (samples or 0):
        size = sizes.at(consumed)
        if size <= 0:
            raise ConfigError("a step without samples", where="global_batch_size", found=str(size))
        batches.append(size)
        starts.append(consumed)
        consumed += size
    return Curves(
        batch_size=batches,
        consumed=starts,
        lr=[schedule.lr(start) for start in starts],
        weight_decay=[schedule.weight_decay(start) for start in starts],
    )


def _number(arguments: Mapping[str, Any], name: str) -> float:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(
            "the schedule needs an argument that was not recorded", where=name, found=repr(value)
        )
    return float(value)


def _optional(arguments: Mapping[str, Any], name: str, otherwise: float = 0.0) -> float:
    return otherwise if arguments.get(name) is None else _number(arguments, name)


__all__ = ["BatchSizes", "Curves", "Schedule", "batch_sizes_of", "curves_of", "schedule_of"]
