"""How the error grows along the model: outputs forward, gradients backward, dW beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_precision.records import INIT_STEP, Comparison, Diagnosis, Phase, Role, Verdict
from mindspeed_precision.report.grid import CODES
from mindspeed_precision.report.measures import relative_error

MOST_STEPS = 6
MOST_MODULES = 1500

_SERIES = {
    (Phase.FPROP, Role.OUTPUT): "forward",
    (Phase.DGRAD, Role.GRAD_OUTPUT): "backward",
    (Phase.DGRAD, Role.GRAD_INPUT): "backward",
    (Phase.WGRAD, Role.WGRAD): "wgrad",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """The worst pair of one module and step, over ranks and microbatches.

    Attributes:
        module: its place in ``Growth.modules``.
        error: relative; None where it is not known.
        verdict: of it.
        estimated: the error is an estimate, or a bound below.
    """

    module: int
    error: float | None
    verdict: Verdict
    estimated: bool


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Error along depth.

    Attributes:
        modules: names in the order of the forward pass.
        steps: the steps that are shown.
        points: by step and series (``forward``, ``backward``, ``wgrad``).
        left_out: modules beyond those that are shown.
    """

    modules: tuple[str, ...]
    steps: tuple[int, ...]
    points: dict[tuple[int, str], tuple[Point, ...]]
    left_out: int = 0


def growth_of(diagnosis: Diagnosis) -> Growth:
    """Return how far apart the modules are, at the first divergence and at some steps after it."""
    found = [c for c in diagnosis.comparisons if (c.key.phase, c.key.role) in _SERIES]
    modules = _modules(found)
    shown = tuple(modules[:MOST_MODULES])
    places = {fqn: place for place, fqn in enumerate(shown)}
    steps = _steps(diagnosis)
    worst: dict[tuple[int, str, int], Comparison] = {}
    for comparison in found:
        key = comparison.key
        module = _module(key.fqn, key.role)
        if key.step not in steps or key.recomputed or module not in places:
            continue
        place = (key.step, _SERIES[key.phase, key.role], places[module])
        if place not in worst or _badness(comparison) > _badness(worst[place]):
            worst[place] = comparison
    points: dict[tuple[int, str], list[Point]] = {}
    for (step, series, number), comparison in sorted(worst.items(), key=lambda item: item[0]):
        points.setdefault((step, series), []).append(_point(number, comparison))
    return Growth(
        modules=shown,
        steps=tuple(sorted(steps)),
        points={key: tuple(some) for key, some in points.items()},
        left_out=len(modules) - len(shown),
    )


def _module(fqn: str, role: Role) -> str:
    """Return the module that a gradient is of, where it has the name of the parameter."""
    return fqn.removesuffix(".weight") if role is Role.WGRAD else fqn


def _modules(found: Iterable[Comparison]) -> list[str]:
    """Return modules in the order in which their outputs are seen first, then those that only dW names."""
    listed = list(found)
    forward = [c.key.fqn for c in listed if c.key.phase is Phase.FPROP and not c.key.recomputed]
    others = [_module(c.key.fqn, c.key.role) for c in listed]
    return list(dict.fromkeys([*forward, *others]))


def _steps(diagnosis: Diagnosis) -> frozenset[int]:
    """Return the first divergent step, the next one, the last one, and some between."""
    first = diagnosis.first_divergence
    begin = first.key.step if first is not None and first.key.step != INIT_STEP else None
    after: Sequence[int] = [step for step in diagnosis.steps if begin is None or step >= begin]
    if len(after) <= MOST_STEPS:
        return frozenset(after)
    between = {after[round(n * (len(after) - 1) / (MOST_STEPS - 2))] for n in range(MOST_STEPS - 1)}
    return frozenset({after[1], *between})


def _badness(comparison: Comparison) -> tuple[int, float]:
    size = relative_error(comparison)
    return CODES[comparison.verdict], size.value if size is not None else 0.0


def _point(module: int, comparison: Comparison) -> Point:
    size = relative_error(comparison)
    return Point(
        module=module,
        error=None if size is None else size.value,
        verdict=comparison.verdict,
        estimated=size is not None and size.source != "elements",
    )
