"""Processor time of rounds by two versions of the package, in turn.

    python benchmarks/commits.py --before CHECKOUT [--only W1,W2,W3] [--pairs 9] [--backend dense]
                                 [--write]

CHECKOUT holds the other version, such as one made by `git worktree add CHECKOUT f00c906`. Each
pair is two new processes, one of each version, which play rounds in turn, TURNS turns each; its
ratio is that of the summed seconds. New processes, because where one's memory lies makes it some
per cent faster or slower for all its life. The interval is that of the pairs' median by order
statistics, at least 95 %. `--write` writes results/commits.md.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "results" / "commits.md"
# Processor seconds that a turn takes at least, so that the clock's grain does not matter.
TURN = 1.0
TURNS = 3


def play(name: str, backend: str) -> None:
    """A process of one version: each line that it reads has it play so many rounds."""
    from workloads import WORKLOADS

    from fedshift import run
    from fedshift.engine.backends import loop

    workload = next(w for w in WORKLOADS if w.name == name)
    federation, algorithm = workload.federation(quick=name == "W1")
    trained_by: Any = loop
    if backend == "dense":
        try:
            from fedshift.engine.stacking.stacked import Stacked
        except ImportError:  # a version before that folder
            from fedshift.engine.stacked import Stacked
        trained_by = Stacked(dense=True)
    rounds = iter(run(algorithm, federation, 10**6, cohort=workload.cohort, backend=trained_by))
    next(rounds)
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            next(rounds)
        print(time.process_time() - began, flush=True)


class Version:
    """A process that plays one workload with the package of one checkout."""

    def __init__(self, checkout: Path, name: str, backend: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "--play", name, "--backend", backend]
        pipe: Any = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd=ROOT
        )

    def seconds(self, rounds: int) -> float:
        """Processor seconds of so many rounds more."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(rounds, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def end(self) -> None:
        """No more rounds."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def interval(ratios: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The narrowest interval of order statistics that has the median with that probability."""
    ordered, n = sorted(ratios), len(ratios)
    best = 0
    for k in range(n // 2):  # P(median below the k-th or above) = 2 sum_{i <= k} C(n, i) / 2^n
        if 1 - 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n >= level:
            best = k
    return ordered[best], ordered[n - 1 - best]


def ratio_of(before: Path, name: str, backend: str) -> float:
    """The ratio now / before of two new processes that take turns."""
    versions = Version(before, name, backend), Version(ROOT, name, backend)
    first = max(v.seconds(1) for v in versions)
    rounds = max(1, round(TURN / first))
    seconds = [0.0, 0.0]
    for turn in range(TURNS):
        for i in (0, 1) if turn % 2 else (1, 0):
            seconds[i] += versions[i].seconds(rounds)
    for version in versions:
        version.end()
    return seconds[1] / seconds[0]


def compared(before: Path, name: str, pairs: int, backend: str) -> dict[str, Any]:
    """The ratios of one workload, pair by pair."""
    ratios = [ratio_of(before, name, backend) for _ in range(pairs)]
    low, high = interval(ratios)
    return {"workload": name, "median": median(ratios), "low": low, "high": high}


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--only", default="W1,W2,W3")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--backend", choices=("loop", "dense"), default="loop")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play(options.play, options.backend)
        return
    if options.before is None:
        parser.error("--before CHECKOUT is missing")
    lines = [
        "# Processor time of the loop, now and before",
        "",
        f"Ratio now / before of {options.pairs} pairs of processes that take turns, by `python "
        f"benchmarks/commits.py --before CHECKOUT --only {options.only} --pairs {options.pairs}`.",
        "",
        "| workload | median ratio | interval of the median |",
        "| --- | ---: | ---: |",
    ]
    for name in options.only.split(","):
        row = compared(options.before.resolve(), name, options.pairs, options.backend)
        print(json.dumps(row), flush=True)
        spread = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(f"| {name} | {row['median']:.3f} | {spread} |")
    if options.write:
        PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
