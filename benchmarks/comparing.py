"""Five methods by five seeds: `fs.compare` with two jobs, and the same runs one after another.

Both in turn, each run with the backend `loop` on one thread. Seconds depend on what else the
machine does. Processor time does not, and from it follows the ratio on two free cores:
(one after another) / (of the main process + of the others / 2).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fedshift as fs

METHODS = ["fedavg", "fedpals", "fedprox", "scaffold", "feddyn"]
OPTIONS: dict[str, dict[str, Any]] = {"fedpals": {"ess": 0.5}, "fedprox": {"mu": 0.1}}


def task(rows: int, columns: int) -> fs.Task:
    """Ten sites with other shares of three classes each, and a target with even ones."""
    rng = np.random.default_rng(0)
    site = rng.integers(0, 11, rows)
    shares = rng.dirichlet(np.ones(3), 11)
    shares[10] = 1 / 3
    y = (rng.random(rows)[:, None] > shares.cumsum(1)[site]).sum(1).clip(max=2)
    x = rng.normal(size=(rows, columns)) + y[:, None] * rng.normal(size=columns) / 4
    names = np.array([f"site {i}" for i in range(11)])
    return fs.Task.from_arrays(x.astype("float32"), y, client=names[site], target="site 10")


def processor() -> tuple[float, float]:
    """Seconds of processor time of this process, and of those that it has waited for."""
    mine, others = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime, others.ru_utime + others.ru_stime


def measured(work: Callable[[], None]) -> tuple[float, float, float]:
    """(seconds, processor time of this process, and of others) that some work takes."""
    began, before = time.perf_counter(), processor()
    work()
    after = processor()
    return time.perf_counter() - began, after[0] - before[0], after[1] - before[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    of = task(6000, 40)
    of.build()
    keys: dict[str, Any] = {"rounds": options.rounds, "hidden": [100, 50], "epochs": 1, "lr": 0.05}

    def alone() -> None:
        for name in METHODS:
            for seed in range(5):
                method = fs.method(name, **OPTIONS.get(name, {}))
                fs.fit(of, "mlp", method=method, seed=seed, backend="loop", **keys)

    def side_by_side() -> None:
        methods = [fs.method(name, **OPTIONS.get(name, {})) for name in METHODS]
        fs.compare(of, "mlp", methods, seeds=5, jobs=2, **keys)

    ratios, free = [], []
    for turn in range(options.turns):
        one, two = measured(alone), measured(side_by_side)
        ratios.append(one[0] / two[0])
        free.append((one[1] + one[2]) / (two[1] + two[2] / 2))
        print(
            f"turn {turn}: one after another {one[0]:.1f} s ({one[1] + one[2]:.1f} s of processor "
            f"time), jobs=2 {two[0]:.1f} s ({two[1]:.1f} s in the main process, {two[2]:.1f} s in "
            f"the others); "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(f"{statistics.median(ratios):.2f} times as fast here (median of {options.turns} turns);")
    print(f"{statistics.median(free):.2f} times on two free cores, by processor time")


if __name__ == "__main__":
    main()
