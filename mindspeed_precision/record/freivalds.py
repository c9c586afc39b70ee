"""Is a matrix the product of two others? Asked of random signs, without the product.

R. Freivalds (*Probabilistic machines can use less running time*, IFIP 1977): for a vector r of random signs
``C r = A (B r)`` where ``C = A B``, and a wrong C is let through with a chance of at most 1/2 for each r.
Three products of a matrix with a vector take the place of one of two matrices.

What rounding may leave: the product that was computed has errors ``E`` with

    |E| <= growth(K) |A| |B| + u |C|,    growth(K) = min(K u' / (1 - K u'), 4 sqrt(K) u')

elementwise for a sum over K terms, with u' the unit roundoff of the accumulator and u that of the result. The
first holds for every order of the sum and whatever the numbers are (N. Higham, *Accuracy and Stability of
Numerical Algorithms*, 2nd ed., section 3.5), the second but for a chance that falls as ``exp(-8)`` for each
element where roundings are independent (Higham and Mary, *A new approach to probabilistic rounding error
analysis*, SIAM J. Sci. Comput. 41, 2019, theorem 3.1); kernels that sum in blocks stay far below both. For
random signs r, which know nothing of E, a row leaves ``|(E r)_i| <= lambda ||E_i||`` but for a chance of
``2 exp(-lambda^2 / 2)`` (Hoeffding 1963), and ``||E_i|| <= growth(K) sum_t |A_it| ||B_t|| + u ||C_i||`` by
the triangle inequality. With lambda = 8 that is a chance of 3e-14 for each row and vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROBES = 4
"""Vectors of signs: a wrong row is let through with a chance of at most 1/16."""

LAMBDA = 8.0

TF32 = 2.0**-11
"""Roundoff of an operand of ten bits, which a device may make of float32 unless it is told not to."""

_OWN = 1e-9
"""Relative error of the check's own sums in float64, with room."""


def own_error(tokens: int, columns: int, *, double: bool) -> float:
    """Return the error of the check's own sums relative to ``sum_t |A_it| ||B_t||``, over ``LAMBDA``.

    Args:
        tokens: terms of the product.
        columns: length of the signs.
        double: whether it sums in float64; not every device has it.
    """
    return _OWN if double else (2 * columns + tokens) * 2.0**-24 * math.sqrt(columns) / LAMBDA


def growth(terms: int, roundoff: float) -> float:
    """Return by how much a sum may be off, relative to the sum of the sizes of its terms.

    Args:
        terms: how many are added.
        roundoff: unit roundoff of the accumulator.
    """
    worst = terms * roundoff / (1 - terms * roundoff) if terms * roundoff < 1 else float("inf")
    return min(worst, 4 * math.sqrt(terms) * roundoff)


@dataclass(frozen=True, kw_only=True)
class Excess:
    """How far a matrix is from a product, against what rounding may leave.

    Attributes:
        ratio: largest residual over its bound; above 1 it is no product of these operands.
        row: where that is.
        relative: residual of the row over the norm of the product's row, both estimated.
        factor: the multiple of the product that it is instead; None: it is no multiple.
    """

    ratio: float
    row: int
    relative: float
    factor: float | None = None


def signs(columns: int, seed: int = 0) -> NDArray[np.float64]:
    """Return random signs ``[columns, PROBES]``, the same for the same arguments."""
    return np.random.default_rng(seed).choice((-1.0, 1.0), size=(columns, PROBES))


def excess(
    product: NDArray[np.float64],
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    *,
    accumulator: float,
    result: float,
    operands: float = 0.0,
    further: NDArray[np.float64] | None = None,
) -> Excess:
    """Compare ``product`` with ``left.T @ right`` by random signs.

    Args:
        product: ``[out, in]``, what was computed.
        left: ``[tokens, out]``.
        right: ``[tokens, in]``.
        accumulator: unit roundoff of the type in which the product was summed.
        result: unit roundoff of the type of ``product``; of 16 bits it may have been rounded between blocks.
        operands: relative error to which operands were rounded first (TF32, HF32); 0: not at all.
        further: ``[out]`` norms of further rounding in the rows (of a sum that the product was taken from).
    """
    probes = signs(right.shape[1])
    exact = left.T @ (right @ probes)
    residual = np.abs(product @ probes - exact)
    sizes = np.abs(left).T @ np.linalg.norm(right, axis=1)
    rows = np.linalg.norm(product, axis=1)
    share = growth(len(left), accumulator) + 2 * operands + own_error(*right.shape, double=True)
    bound = LAMBDA * (share * sizes + 2 * result * rows)
    if further is not None:
        bound = bound + LAMBDA * further
    worst = residual.max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(worst == 0, 0.0, worst / bound)
    row = int(np.argmax(ratios))
    size = float(np.sqrt(np.square(exact[row]).mean()))
    return Excess(
        ratio=float(ratios[row]),
        row=row,
        relative=float(worst[row] / size) if size else float("inf"),
        factor=_multiple(product @ probes, exact) if ratios[row] > 1 else None,
    )


def _multiple(found: NDArray[np.float64], exact: NDArray[np.float64]) -> float | None:
    square = float(np.vdot(exact, exact))
    factor = float(np.vdot(exact, found)) / square if square else 0.0
    return factor if np.linalg.norm(found - factor * exact) <= 1e-2 * np.linalg.norm(found) else None
