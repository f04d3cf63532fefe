"""FedPALS certificates against exact arithmetic: `python benchmarks/certificates.py`.

Federations whose label marginals lie 1e-5 to 1e-8 apart, where rounding weighs most: 2 to 6
clients, 2 to 5 labels, with and without a cap, at lambda = 0, at a lambda, at a given ESS, and in
the unsquared form. Every answer is compared with the optimum in rational arithmetic, which takes
the counts, the target, lambda and the cap for the very numbers they are.

`--count` tries so many programmes (840), `--from` starts at another. `--write` writes
results/certificates.md.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy is imported, or it does nothing

import argparse
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
from exact_weights import Exact, Weights, l1

from fedshift.seeds import numpy_generator
from fedshift.server.pals import PalsWeights, pals_weights

OUT = Path(__file__).parents[1] / "results" / "certificates.md"
PROGRAMMES = 840
# What `certified` promises of the weights, in L1.
PROMISED = 1e-6
NAMES = {
    "zero": "lambda = 0",
    "lambda": "a lambda",
    "ess": "an ESS",
    "norm": "a lambda, unsquared",
}
KINDS = tuple(NAMES)


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


def exact_answer(p: Programme, solved: PalsWeights) -> Weights:
    """The optimum at the lambda that was asked for or, with an ESS, that was reported."""
    exact, near = Exact.of(p.counts, p.target, p.cap), solved.weights.tolist()
    if solved.lam == math.inf:
        return exact.widest(near)
    if p.fidelity == "norm" and solved.lam > 0.0:
        return exact.unsquared(Fraction(solved.lam), near)
    return exact.optimum(Fraction(solved.lam) or exact.nothing, near)


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
