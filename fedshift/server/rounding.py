"""How far rounding can move the weights, by the conditioning of the clients with weight.

Label shares, the target and residuals are rounded, by about 1e-16. If the rows of the free clients
are nearly dependent, that is magnified: the exact solution for the rounded numbers may be far from
the solution for the counts. A proved bound on the error has to include this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedshift.server.simplex import Flags, Floats, Problem, Solution, pull, residual

# Rounding of a row S_i - T and of a residual: a few units in the last place of 1.
ROUNDING = 4e-16
# Relative singular values of the free rows below this are rounding: the rows count as dependent.
RANK_TOLERANCE = 1e-15
# A residual up to this is rounding: the weights mix to the target.
ON_TARGET = 2e-15
# Replaces a singular value that is not zero but lost in rounding.
HIDDEN = 1e-100
# A bound this small need not be computed more exactly.
NEGLIGIBLE = 1e-9
# The rank modulo a prime is never too large. It is too small only if the prime divides all minors
# that matter, which happens by chance for one table in 2^31; two primes make it negligible.
PRIMES = (2**31 - 1, 2**31 - 19)

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Spectrum:
    """Singular values of sqrt(n_i / n_F) (rows_i - mean) above rounding; null: are there zeros?"""

    values: Floats
    null: bool

    @property
    def least(self) -> float:
        """The smallest of them, inf if there are none."""
        return float(self.values.min(initial=np.inf))

    def inward(self, ridge: float) -> float:
        """max s / (s^2 + ridge): how much a changes, in L1, per change of the target."""
        return float((self.values / (self.values**2 + ridge)).max(initial=0.0))

    def sideways(self, ridge: float) -> float:
        """max 1 / (s^2 + ridge): how much a changes, in L1, per change of rows along the residual.

        Without a ridge, null directions are exact ties, and we assume that rounding does not break
        them.
        """
        if self.null and ridge > 0.0:
            return 1.0 / ridge
        return float((1.0 / (self.values**2 + ridge)).max(initial=0.0))


def spectrum(problem: Problem, face: Flags) -> Spectrum:
    """The `Spectrum` of the clients marked in `face` [M]."""
    sizes, rows = problem.sizes[face], problem.rows[face]
    if sizes.size <= 1:
        return Spectrum(np.zeros(0), False)
    share = sizes / sizes.sum()
    x = np.sqrt(share)[:, None] * (rows - share @ rows)
    if x.shape[0] > x.shape[1]:
        x = np.linalg.qr(x, mode="r")  # a smaller matrix with the same singular values
    values = np.linalg.svd(x, compute_uv=False)
    above = values[values > RANK_TOLERANCE]
    if _nearly_dependent(problem, face, above.size):
        # The counts show one more direction, which rounding hides. Without a ridge, its effect has
        # no bound.
        above = np.append(above, HIDDEN)
    return Spectrum(above, above.size < sizes.size - 1)


def _nearly_dependent(problem: Problem, face: Flags, count: int) -> bool:
    """Whether the exact rank of the counts is higher than the `count` values above rounding say."""
    if problem.counts is None or count >= _most_modes(problem, face):
        return False
    return count < rank(problem.counts[face]) - 1


def _most_modes(problem: Problem, face: Flags) -> int:
    """The largest number of singular values above 0 that a face can have.

    Centred rows sum to zero, which takes one away. Labels that none of the clients has do not
    count.
    """
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


def rounding_error(
    problem: Problem,
    lam: float,
    solution: Solution,
    distance: float | None = None,
    shifted: float = 0.0,
) -> float:
    """A bound on the L1 change of the optimum that rounding of the rows and the target can cause.

    On a face F the optimum is a_F = m n_F / n + sqrt(n) u with (X X^T + lam) u = X d. If rows and
    target are off by e, it moves in L1, to first order, by at most
        e max 1/(s^2 + lam/n_F) ||r|| + e max s/(s^2 + lam/n_F) sqrt(n_F sum a_i^2/n_i)
    over the singular values s of X / sqrt(n_F). At lam = 0, T - S^T a counts like e.

    The optimum is continuous in the data, so only faces near F matter: F without or with the
    clients that are about to meet or to leave a bound. A bound for all faces, with s^2 = 0 and
    max s/(s^2 + x) = 1/sqrt(x), is tried first.

    distance  of the hull to the target, if `problem` has the hull's nearest point as its target.
              (If T is outside the hull, the rows of all clients decide where that point is.)
    shifted   how far that point may be off, which counts like a target that is off
    """
    missed = float(np.linalg.norm(residual(problem, solution.weights)))
    length = missed if distance is None else max(distance, missed)
    if problem.price is not None:  # rounding of prices acts like rounding of rows along r
        used = problem.price[solution.weights > 0.0]
        length += float(np.ptp(used)) / 2.0
    if lam > 0.0:
        # First the bound for all faces, which needs no singular values.
        ridge = lam / problem.total
        moved = shifted + ROUNDING * _spread(problem, solution)
        anywhere = ROUNDING * length / ridge + moved / math.sqrt(ridge)
        if anywhere <= NEGLIGIBLE:
            return anywhere
        missed = 0.0
    missed += shifted
    free = (solution.weights > 0.0) & (solution.weights < problem.upper)
    modes = spectrum(problem, free)
    charge = _charge_on_face(problem, lam, solution, free, modes, missed, length)
    for face in _reachable_faces(problem, lam, solution, free, modes, charge, length):
        more = _charge_on_face(
            problem, lam, solution, face, spectrum(problem, face), missed, length
        )
        charge = max(charge, more)
    return charge if lam == 0.0 else min(charge, anywhere)


def _spread(problem: Problem, solution: Solution) -> float:
    """sqrt(N / ESS), at least 1."""
    return math.sqrt(problem.total * float(np.sum(solution.weights**2 / problem.sizes)))


def _charge_on_face(
    problem: Problem,
    lam: float,
    solution: Solution,
    face: Flags,
    modes: Spectrum,
    missed: float,
    length: float,
) -> float:
    """The charge for rounding on one face, with the singular values `modes`."""
    if not face.any():
        return 0.0
    ridge = lam / float(problem.sizes[face].sum())
    moved = (missed + ROUNDING * _spread(problem, solution)) * modes.inward(ridge)
    return moved + ROUNDING * length * modes.sideways(ridge)


def _reachable_faces(
    problem: Problem,
    lam: float,
    solution: Solution,
    free: Flags,
    modes: Spectrum,
    charge: float,
    length: float,
) -> list[Flags]:
    """The faces that rounding could reach: some clients meet a bound, or leave one.

    At lam = 0 also the face of all clients, if T is outside the hull, or if the free clients span
    less than all do: if rounding moves the target off their span, only others can reach it.
    """
    a, upper, n = solution.weights, problem.upper, problem.sizes
    total = float(n[free].sum()) or problem.total
    slack = np.minimum(a, upper - a)
    # A weight is about to meet a bound if the charge, in its units, exceeds its distance to it.
    leaving = free & (slack <= np.sqrt(n / total) * charge)
    wanted = pull(problem, lam, solution.w, solution.theta)
    margin = np.where(a >= upper, wanted - upper / n, -wanted)
    near = charge * (1.0 + 1.0 / modes.least)
    joining = ~free & (total * margin <= near + total * ROUNDING * np.linalg.norm(solution.w))
    faces = []
    if leaving.any():
        faces.append(free & ~leaving)
    if joining.any():
        faces.append(free | joining)
    everyone = np.ones_like(free)
    short = modes.values.size < _most_modes(problem, everyone)
    if lam == 0.0 and (length > ON_TARGET or short):
        faces.append(everyone)
    return faces


def rank(counts: Floats) -> int:
    """The rank of counts [M, K], computed without rounding; they need not be whole numbers."""
    if min(counts.shape, default=0) == 0:
        return 0
    return max(_rank_modulo(_remainders(counts, p), p) for p in PRIMES)


def _remainders(counts: Floats, prime: int) -> Integers:
    """Every row as integers modulo a prime. Each float is a whole multiple of a power of 2, so a
    common factor makes a row of integers.
    """
    if (counts == np.rint(counts)).all() and float(np.abs(counts).max()) < 2.0**62:
        return counts.astype(np.int64) % prime
    rows = []
    for row in counts.tolist():
        exact = [Fraction(x) for x in row]
        common = max(x.denominator for x in exact)
        rows.append([int(x * common) % prime for x in exact])
    return np.array(rows, dtype=np.int64)


def _rank_modulo(table: Integers, prime: int) -> int:
    """The rank modulo a prime, by elimination; products of two remainders fit into int64."""
    rest = table if table.shape[0] <= table.shape[1] else np.ascontiguousarray(table.T)
    count = 0
    while rest.size:
        row, rest = rest[0], rest[1:]
        columns = np.flatnonzero(row)
        if columns.size == 0:
            continue
        column = int(columns[0])
        row = row * pow(int(row[column]), -1, prime) % prime
        rest = (rest - rest[:, column : column + 1] * row % prime) % prime
        rest = np.delete(rest, column, axis=1)
        count += 1
    return count
