"""Other solvers of FedPALS' programme: clarabel's cones, and rational arithmetic."""

from __future__ import annotations

import sys
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import clarabel
import numpy as np
import scipy.sparse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
exact_weights = import_module("exact_weights")


def conic(rows, target, quadratic, cap=None, norm=False, fixed=None) -> np.ndarray:
    """argmin ||v||^2 + sum quadratic_i a_i^2 with v = T - S^T a, on the (capped) simplex.

    norm: ||v||, not squared; fixed: v has to be this [K].
    """
    clients, width = rows.shape
    one = scipy.sparse.csc_matrix
    square = 0.0 if norm or fixed is not None else 2.0
    cost = np.concatenate([2 * quadratic, np.full(width, square), np.zeros(int(norm))])
    whole = clients + width + int(norm)
    pick_a, pick_v = one(np.eye(clients, whole)), one(np.eye(width, whole, k=clients))
    blocks = [one(np.r_[np.ones(clients), np.zeros(whole - clients)][None])]
    blocks, sides = [*blocks, one(rows.T) @ pick_a + pick_v], [[1.0], target]
    if fixed is not None:
        blocks, sides = [*blocks, pick_v], [*sides, fixed]
    cones = [clarabel.ZeroConeT(sum(len(s) for s in sides))]
    blocks, sides = [*blocks, -pick_a], [*sides, np.zeros(clients)]
    if cap is not None:
        blocks, sides = [*blocks, pick_a], [*sides, np.full(clients, cap)]
    cones.append(clarabel.NonnegativeConeT(clients * (1 if cap is None else 2)))
    if norm:
        last = one(([-1.0], ([0], [whole - 1])), shape=(1, whole))
        blocks, sides = [*blocks, last, -pick_v], [*sides, np.zeros(1 + width)]
        cones.append(clarabel.SecondOrderConeT(1 + width))
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-13
    linear = np.r_[np.zeros(clients + width), np.ones(int(norm))]
    solver = clarabel.DefaultSolver(
        one(scipy.sparse.diags(cost)), linear, one(scipy.sparse.vstack(blocks)),
        np.concatenate(sides), cones, settings,
    )  # fmt: skip
    weights = np.clip(np.array(solver.solve().x[:clients]), 0.0, None)
    return weights / weights.sum()


def off_exact(counts, target, lam: float, weights: np.ndarray, cap: float | None = None) -> float:
    """||a - a*||_1 at a lambda of the squared form (0: the limit), a* in rational arithmetic."""
    table = [[int(x) for x in row] for row in np.asarray(counts)]
    exact = exact_weights.Exact.of(table, [float(t) for t in target], cap)
    near = weights.tolist()
    return float(exact_weights.l1(near, exact.optimum(Fraction(lam) or exact.nothing, near)))
