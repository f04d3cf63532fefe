"""FedPALS certificates against exact arithmetic: `python benchmarks/certificates.py`.

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

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np

from fedshift.seeds import numpy_generator
from fedshift.server.pals import PalsWeights, pals_weights

OUT = Path(__file__).parents[1] / "docs" / "results" / "certificates.md"
PROGRAMMES = 840
# What `certified` promises of the weights, in L1.
PROMISED = 1e-6
# lambda / N that stands for lambda -> 0+: the optimum there is the limit to some hundred digits.
NOTHING = Fraction(1, 2**2000)
NAMES = {
    "zero": "lambda = 0",
    "lambda": "a lambda",
    "ess": "an ESS",
    "norm": "a lambda, unsquared",
}
KINDS = tuple(NAMES)

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
    def fidelity(self) -> Literal["squared", "norm"]:
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
    target /= target.sum()
    lam = ess = None
    if kind == "ess":
        ess = float(rng.uniform(0.05, 1.0))
    elif kind == "zero":
        lam = 0.0
    else:
        lam = float(counts.sum() * apart ** rng.choice([1, 2]) * 10 ** rng.uniform(-4, 2))
    cap = float(min(0.999, rng.uniform(1.001, 2.0) / clients)) if rng.random() < 0.6 else None
    if ess is not None:  # the largest under a cap can be below 1
        ess *= pals_weights(counts, target, lam=math.inf, cap=cap).ess_fraction
    return Programme(counts.tolist(), target.tolist(), kind, lam, ess, cap)


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


def root(x: Fraction) -> Fraction:
    """sqrt(x) to about 200 binary digits."""
    if x == 0:
        return x
    shift = 2 * (200 - (x.numerator.bit_length() - x.denominator.bit_length()) // 2)
    scaled = x * Fraction(2) ** shift
    return Fraction(math.isqrt(scaled.numerator // scaled.denominator)) / Fraction(2) ** (
        shift // 2
    )


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

    ||r(mu)|| / mu falls as mu grows, so that there is one such mu, or none: then r = 0.
    """

    def above(mu: Fraction) -> bool:
        return 2 * lam * root(exact.distance2(exact.optimum(mu, near))) <= mu

    low = NOTHING * exact.total
    if above(low):
        return exact.optimum(low, near)
    high = low + 2 * lam * root(exact.distance2([Fraction(x) for x in near]))
    while not above(high):
        low, high = high, 4 * high
    step = Fraction(2)
    while high / step > low and above(high / step):
        high, step = high / step, step**2
    low = max(low, high / step)
    while high > low * (1 + Fraction(1, 10**20)):
        mid = root(low * high)
        low, high = (low, mid) if above(mid) else (mid, high)
    return exact.optimum(high, near)


def l1(weights: Sequence[float], exact: Weights) -> float:
    """||a - a*||_1."""
    pairs = zip(weights, exact, strict=True)
    return float(sum((abs(Fraction(float(x)) - y) for x, y in pairs), Fraction(0)))


# --------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Row:
    """What came out for programmes of one kind."""

    programmes: int = 0
    right: int = 0
    certified: int = 0
    false: int = 0
    worst: float = 0.0

    def with_answer(self, certified: bool, off: float) -> Row:
        """One programme more, off by so much."""
        return Row(
            self.programmes + 1,
            self.right + (off <= PROMISED),
            self.certified + certified,
            self.false + (certified and off > PROMISED),
            max(self.worst, off if certified else 0.0),
        )


def run(first: int, count: int) -> dict[str, Row]:
    """The rows of the table, by kind and whether there is a cap."""
    rows: dict[str, Row] = {}
    for index in range(first, first + count):
        programme = draw(index)
        solved = programme.solve()
        off = l1(solved.weights.tolist(), exact_answer(programme, solved))
        what = f"{NAMES[programme.kind]}, {'capped' if programme.cap else 'no cap'}"
        row = rows.get(what, Row()).with_answer(solved.certified, off)
        rows[what], rows["all"] = row, rows.get("all", Row()).with_answer(solved.certified, off)
    return {what: rows[what] for what in [*sorted(rows.keys() - {"all"}), "all"]}


def table(rows: dict[str, Row]) -> list[str]:
    """As Markdown."""
    lines = [
        "| programmes | count | right | certified | certified and wrong | worst of the certified |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for what, r in rows.items():
        lines.append(
            f"| {what} | {r.programmes} | {r.right} | {r.certified} | {r.false} | {r.worst:.1e} |"
        )
    return lines


PAGE = """# Certificates against exact arithmetic

`pals_weights` on {count} federations whose label marginals lie 1e-5 to 1e-8 apart (2 to 6 clients,
2 to 5 labels), where rounding weighs most; each answer is compared with the optimum in rational
arithmetic, which takes counts, target, lambda and cap for the very numbers they are. Right: within
1e-6 in L1, which is what `certified` promises. With an ESS given, the optimum is that of the lambda
which the search reports. At lambda = 0 it is the one of largest ESS among the nearest; no optimum
here is ambiguous. Made by `python benchmarks/certificates.py --write`.

{table}
"""


def main() -> None:
    """Parses the options; prints the table, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=PROGRAMMES)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    lines = "\n".join(table(run(chosen.first, chosen.count)))
    print(lines)
    if chosen.write:
        OUT.write_text(PAGE.format(count=chosen.count, table=lines))


if __name__ == "__main__":
    main()
