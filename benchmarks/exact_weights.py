"""FedPALS weights in rational arithmetic, for a handful of clients: what answers are compared with.

a = argmin ||T - S^T a||^2 + lam sum_i a_i^2 / n_i   subject to   sum a = 1, 0 <= a <= u
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

# lambda / N that stands for lambda -> 0+: the optimum there is the limit to some hundred digits.
NOTHING = Fraction(1, 2**2000)

Weights = list[Fraction]


@dataclass(frozen=True)
class Exact:
    """The programme in rationals: Gram matrix of the rows S_i - T, sizes n, bound u."""

    gram: list[list[Fraction]]
    sizes: list[int]
    upper: Fraction

    @staticmethod
    def of(counts: list[list[int]], target: list[float], cap: float | None) -> Exact:
        """That of counts [M, K] and a target [K]."""
        sizes = [sum(row) for row in counts]
        t = [Fraction(x) for x in target]
        rows = [
            [Fraction(x, n) - y for x, y in zip(row, t, strict=True)]
            for row, n in zip(counts, sizes, strict=True)
        ]
        gram = [[_dot(x, y) for y in rows] for x in rows]
        return Exact(gram, sizes, Fraction(2) if cap is None else Fraction(cap))

    @property
    def total(self) -> int:
        """N."""
        return sum(self.sizes)

    def distance2(self, a: Weights) -> Fraction:
        """||T - S^T a||^2 of weights that sum to 1."""
        return _dot(a, [_dot(row, a) for row in self.gram])

    @property
    def nothing(self) -> Fraction:
        """The lambda that stands for lambda -> 0+."""
        return NOTHING * self.total

    def optimum(self, lam: Fraction, near: Sequence[float]) -> Weights:
        """argmin of the squared form at lam > 0: faces from near a guess on, then all of them.

        The one whose point satisfies the conditions of a minimum exactly is it.
        """
        for status in itertools.chain(self._pivots(lam, near), self._faces()):
            a, slopes = self._on_face(lam, status)
            if a is not None and not self._following(status, a, slopes):
                return a
        raise AssertionError("no face satisfies the conditions of a minimum")

    def unsquared(self, lam: Fraction, near: Sequence[float]) -> Weights:
        """The optimum of the unsquared form: the squared one's at mu = 2 lam ||r(mu)||.

        By bisection on log mu: ||r(mu)|| / mu falls, so there is one such mu, or none: then r = 0.
        """

        def above(mu: Fraction) -> bool:
            nonlocal near
            a = self.optimum(mu, near)
            near = [float(x) for x in a]
            return 2 * lam * root(self.distance2(a)) <= mu

        low = self.nothing
        if above(low):
            return self.optimum(low, near)
        high = low + 2 * lam * root(self.distance2([Fraction(x) for x in near]), 60)
        while not above(high):
            low, high = high, 4 * high
        step = Fraction(2)
        while high / step > low and above(high / step):
            high, step = high / step, step**2
        low = max(low, high / step)
        while high > low * (1 + Fraction(1, 10**14)):
            mid = root(low * high, 60)
            low, high = (low, mid) if above(mid) else (mid, high)
        return self.optimum(high, near)

    def widest(self, near: Sequence[float]) -> Weights:
        """The weights of largest ESS under the cap, where lambda -> inf leads."""
        flat = replace(self, gram=[[Fraction(0)] * len(self.sizes) for _ in self.sizes])
        return flat.optimum(Fraction(1), near)

    def _faces(self) -> Iterator[tuple[int, ...]]:
        return itertools.product((0, -1, 1), repeat=len(self.sizes))

    def _pivots(self, lam: Fraction, near: Sequence[float]) -> Iterator[tuple[int, ...]]:
        bound = float(self.upper)
        status = tuple(-1 if x <= 1e-13 else 1 if x >= bound * (1 - 1e-13) else 0 for x in near)
        for count in range(150):
            yield status
            a, slopes = self._on_face(lam, status)
            if a is None:
                return
            following = self._following(status, a, slopes) or status
            if count >= 10:  # all violators at once may cycle: the first of them alone
                first = [s != t for s, t in zip(status, following, strict=True)].index(True)
                following = (*status[:first], following[first], *status[first + 1 :])
            status = following

    def _on_face(
        self, lam: Fraction, status: tuple[int, ...]
    ) -> tuple[Weights | None, list[Fraction]]:
        """The stationary point with bound weights held, and half of f's slopes less their level."""
        free = [i for i, s in enumerate(status) if s == 0]
        a = [self.upper if s == 1 else Fraction(0) for s in status]
        left = 1 - sum(a, Fraction(0))
        if not free:
            return None, []
        pull = [_dot(self.gram[i], a) for i in free]
        system = [
            [self.gram[i][j] + (lam / self.sizes[i] if i == j else 0) for j in free]
            + [Fraction(1), -p]
            for i, p in zip(free, pull, strict=True)
        ]
        system.append([Fraction(1)] * len(free) + [Fraction(0), left])
        *values, level = _gauss(system)
        for i, x in zip(free, values, strict=True):
            a[i] = x
        slopes = [
            _dot(self.gram[i], a) + lam * x / n + level
            for i, (x, n) in enumerate(zip(a, self.sizes, strict=True))
        ]
        return a, slopes

    def _following(
        self, status: tuple[int, ...], a: Weights, slopes: list[Fraction]
    ) -> tuple[int, ...] | None:
        """The status with every violator moved; None where there is none."""
        clipped = tuple(
            s if s else -1 if x < 0 else 1 if x > self.upper else 0
            for s, x in zip(status, a, strict=True)
        )
        if clipped != status:
            return clipped
        freed = tuple(0 if s * g > 0 else s for s, g in zip(status, slopes, strict=True))
        return None if freed == status else freed


def _dot(x: Sequence[Fraction], y: Sequence[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))


def _gauss(system: list[list[Fraction]]) -> list[Fraction]:
    """Solves [A | b] exactly."""
    size = len(system)
    for c in range(size):
        p = next(r for r in range(c, size) if system[r][c] != 0)
        system[c], system[p] = system[p], system[c]
        system[c] = [x / system[c][c] for x in system[c]]
        for r in range(size):
            if r != c and system[r][c] != 0:
                system[r] = [
                    x - system[r][c] * y for x, y in zip(system[r], system[c], strict=True)
                ]
    return [row[-1] for row in system]


def root(x: Fraction, digits: int = 200) -> Fraction:
    """sqrt(x) to so many binary digits."""
    if x == 0:
        return x
    shift = 2 * (digits - (x.numerator.bit_length() - x.denominator.bit_length()) // 2)
    scaled = x * Fraction(2) ** shift
    return Fraction(math.isqrt(scaled.numerator // scaled.denominator)) / Fraction(2) ** (
        shift // 2
    )


def l1(weights: Sequence[float], exact: Weights) -> float:
    """||a - a*||_1."""
    pairs = zip(weights, exact, strict=True)
    return float(sum((abs(Fraction(float(x)) - y) for x, y in pairs), Fraction(0)))
