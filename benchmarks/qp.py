"""Time and accuracy of the FedPALS weights, one thread: `python benchmarks/qp.py [--quick]`.

Each line is one call of `fedshift.pals_weights`, input checks and hull distance included, on a
task drawn from a fixed seed. A target "in" is a mixture of the clients; one "out" is drawn freely
and may still be in the hull, see the distance.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy is imported, or it does nothing

import argparse
import platform
import time
from dataclasses import dataclass

import numpy as np
import scipy

from fedshift.seeds import numpy_generator
from fedshift.server.pals import PalsWeights, pals_weights

LAMBDAS = (0.0, 1e-6, 1e-3, 10.0, 1000.0, float("inf"))
QUICK = ((10, 10), (100, 182), (1_000, 10), (1_000, 182))
FULL = (*QUICK, (100, 10), (100, 1_000), (1_000, 1_000), (10_000, 10), (10_000, 182), (100_000, 10))
# Clients, classes, least lambda and the seconds a call may take.
FIGURES = ((1_000, 182, 0.0, 0.3), (10_000, 182, 0.0, 3.0), (100_000, 10, 1e-3, 3.0))


@dataclass(frozen=True)
class Task:
    """Label counts [M, K] and a target [K]."""

    counts: np.ndarray
    target: np.ndarray


def draw(clients: int, classes: int, inside: bool) -> Task:
    """Log-normal sizes from 1 to 20,000, Dirichlet(0.3) rows around a Dirichlet(0.5) base."""
    rng = numpy_generator("benchmark-qp", clients, classes, int(inside))
    sizes = np.clip(np.exp(rng.normal(5.0, 1.5, clients)), 1, 20_000).astype(np.int64)
    base = rng.dirichlet(np.full(classes, 0.5))
    shares = rng.dirichlet(0.3 * classes * base + 1e-3, size=clients)
    counts = rng.multinomial(sizes, shares).astype(float)
    if inside:
        target = rng.dirichlet(np.full(clients, 0.3)) @ (counts / sizes[:, None])
    else:
        target = rng.dirichlet(np.full(classes, 0.3))
        target = np.where(target < 0.2 / classes, 0.0, target)
    return Task(counts, target / target.sum())


def timed(task: Task, **chosen: float) -> tuple[float, PalsWeights]:
    """Seconds and result of one call."""
    start = time.perf_counter()
    solved = pals_weights(task.counts, task.target, **chosen)
    return time.perf_counter() - start, solved


def line(
    clients: int, classes: int, inside: bool, what: str, seconds: float, s: PalsWeights
) -> str:
    """One row of the table."""
    return (
        f"{clients:>7} {classes:>5} {'in' if inside else 'out':>4} {what:>9} {seconds:>8.3f} "
        f"{s.gap:>8.1e} {'yes' if s.certified else 'NO':>4} {s.ess_fraction:>7.4f} "
        f"{s.distance:>8.1e}"
    )


def run(sizes: tuple[tuple[int, int], ...]) -> dict[tuple[int, int, float], float]:
    """Prints the table; the longest time per (clients, classes, lambda)."""
    longest: dict[tuple[int, int, float], float] = {}
    for clients, classes in sizes:
        for inside in (False, True):
            task = draw(clients, classes, inside)
            for lam in LAMBDAS:
                seconds, solved = timed(task, lam=lam)
                key = (clients, classes, lam)
                longest[key] = max(seconds, longest.get(key, 0.0))
                print(line(clients, classes, inside, f"{lam:g}", seconds, solved), flush=True)
            seconds, solved = timed(task, ess=0.5)
            print(line(clients, classes, inside, "ess=0.5", seconds, solved), flush=True)
    return longest


def main() -> None:
    """Parses the options, prints versions, table and the figures to reach."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only sizes that take seconds in all")
    sizes = QUICK if parser.parse_args().quick else FULL
    print(f"python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__},")
    print(f"{platform.machine()}, one BLAS thread")
    print("      M     K    T    lambda  seconds      gap cert   ESS/N distance")
    longest = run(sizes)
    for clients, classes, least, allowed in FIGURES:
        times = [
            t for (m, k, lam), t in longest.items() if (m, k) == (clients, classes) and lam >= least
        ]
        if times:
            verdict = "reached" if max(times) < allowed else "MISSED"
            print(f"M={clients} K={classes}: {max(times):.3f} s, to reach {allowed} s: {verdict}")


if __name__ == "__main__":
    main()
