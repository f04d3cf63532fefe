"""Certificates of the FedPALS weights against exact arithmetic: `python benchmarks/certificates.py`.

Federations whose label marginals lie 1e-5 to 1e-8 apart, where rounding weighs most: 2 to 6
clients, 2 to 5 labels, with and without a cap, at lambda = 0, at a lambda, at a given ESS, and in
the unsquared form. Every answer is compared with the optimum in rational arithmetic, which takes
the counts, the target, lambda and the cap for the very numbers they are.

`--count` tries so many programmes (840), `--from` starts at another. `--write` writes
docs/results/certificates.md.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy is imported, or it does nothing

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from fedshift.seeds import numpy_generator
from fedshift.server.pals import Fidelity, PalsWeights, pals_weights

OUT = Path(__file__).parents[1] / "docs" / "results" / "certificates.md"
PROGRAMMES = 840
# What `certified` promises of the weights, in L1.
PROMISED = 1e-6
# lambda / N that stands for lambda -> 0+: the optimum there is the limit to some hundred digits.
NOTHING = Fraction(1, 2**2000)
KINDS = ("zero", "lambda", "ess", "norm")

Weights = list[Fraction]


@dataclass(frozen=True)
class Programme:
    """Label counts [M, K], target [K], and the setting: one of lam and ess, perhaps a cap."""

    counts: list[list[int]]
    target: list[float]
    kind: str
    lam: float | None
    ess: float | None
    cap: float | None

    @property
    def fidelity(self) -> Fidelity:
        """The form of the first term."""
        return "norm" if self.kind == "norm" else "squared"

    def solve(self) -> PalsWeights:
        """The library's answer."""
        return pals_weights(
            self.counts, self.target,
            lam=self.lam, ess=self.ess, cap=self.cap, fidelity=self.fidelity,
        )  # fmt: skip


def draw(index: int) -> Programme:
    """Programme `index`: clients drawn around one marginal, the target in, near or off the hull."""
    rng = numpy_generator("benchmark-certificates", index)
    kind = KINDS[index % len(KINDS)]
    clients, classes = int(rng.integers(2, 7)), int(rng.integers(2, 6))
    apart = float(10 ** rng.uniform(-8, -5))
    base = rng.dirichlet(np.full(classes, 2.0))
    size = int(10 ** rng.uniform(1, 2) / apart)
    sizes = np.full(clients, size)
    if rng.random() < 0.5:
        sizes = (size * 10 ** rng.uniform(0, 2, clients)).astype(np.int64)
    shares = np.maximum(base + apart * rng.normal(size=(clients, classes)), 0.0)
    shares /= shares.sum(axis=1, keepdims=True)
    counts = np.maximum(np.rint(shares * sizes[:, None]), 0).astype(np.int64)
    place = rng.choice(["in", "near", "off"])
    target = rng.dirichlet(np.ones(clients)) @ (counts / counts.sum(1)[:, None])
    if place == "near":
        target = target + 3.0 * apart * rng.normal(size=classes)
    elif place == "off":
        target = rng.dirichlet(np.ones(classes))
    target = np.maximum(target, 0.0)
    lam = ess = None
    if kind == "ess":
        ess = float(rng.uniform(0.05, 1.0))
    elif kind == "zero":
        lam = 0.0
    else:
        lam = float(counts.sum() * apart ** rng.choice([1, 2]) * 10 ** rng.uniform(-4, 2))
    # The largest ESS under a cap may be below the one asked for; other kinds have one by halves.
    cap = float(min(0.999, rng.uniform(1.001, 2.0) / clients))
    capped = kind != "ess" and rng.random() < 0.6
    return Programme(
        counts.tolist(), (target / target.sum()).tolist(), kind, lam, ess, cap if capped else None
    )


# --------------------------------------------------------------------------- exact optimum


@dataclass(frozen=True)
class Exact:
    """The programme in rationals: Gram matrix of the rows S_i - T, sizes n, bound u."""

    gram: list[list[Fraction]]
    sizes: list[int]
    upper: Fraction

    @staticmethod
    def of(p: Programme) -> Exact:
        """That of a programme."""
        sizes = [sum(row) for row in p.counts]
        t = [Fraction(x) for x in p.target]
        rows = [
            [Fraction(x, n) - y for x, y in zip(row, t, strict=True)]
            for row, n in zip(p.counts, sizes, strict=True)
        ]
        gram = [[_dot(x, y) for y in rows] for x in rows]
        return Exact(gram, sizes, Fraction(2) if p.cap is None else Fraction(p.cap))

    @property
    def total(self) -> int:
        """N."""
        return sum(self.sizes)

    def distance2(self, a: Weights) -> Fraction:
        """||T - S^T a||^2 of weights that sum to 1."""
        return _dot(a, [_dot(row, a) for row in self.gram])

    def ess_fraction(self, a: Weights) -> Fraction:
        """ESS(a) / N."""
        spread = sum((x * x / n for x, n in zip(a, self.sizes, strict=True)), Fraction(0))
        return 1 / (self.total * spread)

    def optimum(self, lam: Fraction, near: Sequence[float]) -> Weights:
        """argmin of the squared form at lam > 0: faces from near a guess on, then all of them.

        The one whose point satisfies the conditions of a minimum exactly is it.
        """
        for status in itertools.chain(self._pivots(lam, near), self._faces()):
            a, slopes = self._on_face(lam, status)
            if a is not None and not self._following(status, a, slopes):
                return a
        raise AssertionError("no face satisfies the conditions of a minimum")

    def _faces(self) -> Iterator[tuple[int, ...]]:
        return itertools.product((0, -1, 1), repeat=len(self.sizes))

    def _pivots(self, lam: Fraction, near: Sequence[float]) -> Iterator[tuple[int, ...]]:
        bound = float(self.upper)
        status = tuple(-1 if x <= 1e-13 else 1 if x >= bound * (1 - 1e-13) else 0 for x in near)
        for _ in range(30):
            yield status
            a, slopes = self._on_face(lam, status)
            if a is None:
                return
            status = self._following(status, a, slopes) or status

    def _on_face(
        self, lam: Fraction, status: tuple[int, ...]
    ) -> tuple[Weights | None, list[Fraction]]:
        """The stationary point with the bound weights held, and f's half slopes less their level."""
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


def root(x: Fraction) -> Fraction:
    """sqrt(x) to 400 binary digits behind the point."""
    return Fraction(math.isqrt((x.numerator << 800) // x.denominator), 1 << 400)


def exact_answer(p: Programme, solved: PalsWeights) -> Weights:
    """The optimum at the lambda that was asked for or, with an ESS, that was reported."""
    exact, near = Exact.of(p), solved.weights.tolist()
    if solved.lam == math.inf:
        return [Fraction(n, exact.total) for n in exact.sizes]
    least = NOTHING * exact.total
    if p.fidelity == "squared" or solved.lam == 0.0:
        return exact.optimum(Fraction(solved.lam) or least, near)
    return _norm_optimum(exact, Fraction(solved.lam), near)


def _norm_optimum(exact: Exact, lam: Fraction, near: list[float]) -> Weights:
    """The squared form's optimum at mu = 2 lam ||r(mu)||, by bisection on log mu.

    ||r(mu)|| / mu falls, so that the root is unique; where it is below the least mu, r = 0.
    """
    low = NOTHING * exact.total
    a = exact.optimum(low, near)
    if 2 * lam * root(exact.distance2(a)) <= low * (1 + Fraction(1, 10**9)):
        return a
    guess = 2.0 * float(lam) * math.sqrt(float(exact.distance2([Fraction(x) for x in near])))
    high = Fraction(guess) if guess > 0 else Fraction(1)
    while 2 * lam * root(exact.distance2(exact.optimum(high, near))) > high:
        low, high = high, high * 4
    for factor in (2, 2**8, 2**32, 2**128, 2**512):
        if (mu := high / factor) > low:
            if 2 * lam * root(exact.distance2(exact.optimum(mu, near))) > mu:
                low = mu
                break
            high = mu
    while high > low * (1 + Fraction(1, 10**18)):
        bits = Fraction(math.isqrt(int(high / low * (1 << 200))), 1 << 100)
        mid = low * bits
        mid = Fraction(int(mid * (1 << 1200)), 1 << 1200) if mid * (1 << 1000) > 1 else mid
        a = exact.optimum(mid, near)
        if 2 * lam * root(exact.distance2(a)) > mid:
            low = mid
        else:
            high = mid
    return exact.optimum(high, near)


def l1(weights: Sequence[float], exact: Weights) -> float:
    """||a - a*||_1."""
    pairs = zip(weights, exact, strict=True)
    return float(sum((abs(Fraction(float(x)) - y) for x, y in pairs), Fraction(0)))
