"""How far rounding can move the weights, by the conditioning of the clients with weight.

Label shares, the target and residuals are rounded, by about 1e-16. If the rows of the free clients
are nearly dependent, that is magnified: the exact solution for the rounded numbers may be far from
the solution for the counts. A proved bound on the error has to include this.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fedshift.server.dual import ON_TARGET, RANK_TOLERANCE, Flags, Floats, Problem, Solution

# Rounding of a row S_i - T and of a residual: a few units in the last place of 1.
ROUNDING = 4e-16
# Replaces a singular value that is not zero but lost in rounding.
HIDDEN = 1e-100
# The rank modulo a prime is never too large, and too small for one table in 2^31.
PRIME = 2**31 - 1


def charge(
    problem: Problem, lam: float, solution: Solution, distance: float = 0.0, missed: float = 0.0
) -> float:
    """A bound on the L1 change of the optimum that rounding of the rows and the target can cause.

    If rows and target are off by e, the optimum on a face moves in L1, to first order, by at most
        e max 1/(s^2 + ridge) ||r|| + (e sqrt(N / ESS) + missed) max s/(s^2 + ridge)
    over the singular values s of its rows, sqrt(m) (x - mean). With s^2 = 0 and max s/(s^2 + x) =
    1/sqrt(x), this holds for all faces. If that is not enough, the optimum is continuous in the
    data, so that only faces near that of the solution matter.

    distance  of the hull to the target, if `problem` has the hull's nearest point as its target
    missed    how far that point may be off, which counts like a target that is off
    """
    a, ridge = solution.weights, lam / float(problem.sizes.sum())
    off = float(np.linalg.norm(a @ problem.rows))
    length = max(distance, off)
    spread = ROUNDING * math.sqrt(float(np.sum(a**2 / problem.share)))
    anywhere = math.inf
    if ridge > 0.0:
        anywhere = ROUNDING * length / ridge + (missed + spread) / math.sqrt(ridge)
        if anywhere <= 1e-9:
            return anywhere
    else:
        missed += off
    free = (a > 0.0) & (a < problem.upper)

    def on(face: Flags) -> float:
        values, null = spectrum(problem, face)
        own = ridge / float(problem.share[face].sum())
        inward = float((values / (values**2 + own)).max(initial=0.0))
        # Without a ridge, null directions are exact ties, which rounding does not break.
        tilt = 1.0 / own if null and own > 0.0 else float((1 / (values**2 + own)).max(initial=0.0))
        return (missed + spread) * inward + ROUNDING * length * tilt

    if not free.any():
        return 0.0
    worst = on(free)
    for face in _reachable(problem, ridge, solution, free, worst, length):
        worst = max(worst, on(face))
    return min(worst, anywhere)


def _reachable(
    problem: Problem, ridge: float, solution: Solution, free: Flags, worst: float, length: float
) -> list[Flags]:
    """The faces that rounding could reach: some clients meet a bound, or leave one.

    At lam = 0 also that of all clients, if T is outside the hull, or if the free ones span less.
    """
    a, upper, m = solution.weights, problem.upper, problem.share
    leaving = free & (np.minimum(a, upper - a) <= np.sqrt(m / m[free].sum()) * worst)
    wanted = problem.rows @ solution.w + solution.theta
    margin = np.where(a >= upper, wanted - upper / m, -wanted)
    values, _ = spectrum(problem, free)
    near = worst * (1.0 + 1.0 / float(values.min(initial=np.inf)))
    joining = ~free & (margin <= near + ROUNDING * float(np.linalg.norm(solution.w)))
    faces = [free & ~leaving] * bool(leaving.any() and not leaving[free].all()) + [
        free | joining
    ] * bool(joining.any())
    everyone = np.ones_like(free)
    if ridge == 0.0 and (length > ON_TARGET or values.size < _most_modes(problem, everyone)):
        faces.append(everyone)
    return faces


def spectrum(problem: Problem, face: Flags) -> tuple[Floats, bool]:
    """(singular values of sqrt(m_i / m_F) (rows_i - mean) above rounding; whether some are 0)."""
    sizes, rows = problem.sizes[face], problem.rows[face]
    if sizes.size <= 1:
        return np.zeros(0), False
    share = sizes / sizes.sum()
    x = np.sqrt(share)[:, None] * (rows - share @ rows)
    if x.shape[0] > x.shape[1]:
        x = np.linalg.qr(x, mode="r")  # a smaller matrix with the same singular values
    values = np.linalg.svd(x, compute_uv=False)
    values = values[values > RANK_TOLERANCE]
    counts = problem.counts if values.size < _most_modes(problem, face) else None
    if counts is not None and values.size < rank(counts[face]) - 1:
        # The counts show one more direction, which rounding hides: its effect has no bound.
        values = np.append(values, HIDDEN)
    return values, values.size < sizes.size - 1


def _most_modes(problem: Problem, face: Flags) -> int:
    """The most singular values above 0 that a face can have; centred rows sum to zero."""
    labels: int = problem.rows.shape[1]
    if problem.counts is not None:
        labels = int((problem.counts[face] > 0.0).any(axis=0).sum())
    return min(int(np.count_nonzero(face)), labels) - 1


def span_part(rows: Floats, x: Floats) -> Floats:
    """The part of x [K] in the span of centred rows [M, K], without directions below rounding."""
    square = np.linalg.qr(rows, mode="r") if rows.shape[0] > rows.shape[1] else rows
    _, values, basis = np.linalg.svd(square, full_matrices=False)
    basis = basis[values > RANK_TOLERANCE]
    part: Floats = (basis @ x) @ basis
    return part


def rank(counts: Floats) -> int:
    """The rank of counts [M, K], without rounding, by elimination modulo a prime.

    Every float is a whole multiple of a power of 2, so that a factor makes its row integers.
    """
    whole = bool((counts == np.rint(counts)).all()) and float(np.abs(counts).max(initial=0)) < 2**62
    if whole:
        rest = counts.astype(np.int64) % PRIME
    else:
        rows = [[Fraction(x) for x in row] for row in counts.tolist()]
        common = [max(x.denominator for x in row) for row in rows]
        rest = np.array(
            [[int(x * c) % PRIME for x in row] for row, c in zip(rows, common, strict=True)]
        )
    rest = rest if rest.shape[0] <= rest.shape[1] else np.ascontiguousarray(rest.T)
    count = 0
    while rest.size:
        row, rest = rest[0], rest[1:]
        columns = np.flatnonzero(row)
        if columns.size:
            column = int(columns[0])
            row = row * pow(int(row[column]), -1, PRIME) % PRIME
            rest = (rest - rest[:, column : column + 1] * row % PRIME) % PRIME
            rest = np.delete(rest, column, axis=1)
            count += 1
    return count
