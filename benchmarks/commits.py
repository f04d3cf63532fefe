"""Processor time of rounds by two versions of the package, in turn.

    python benchmarks/commits.py --before CHECKOUT [--only W1,W5/dense] [--pairs 5] [--write]

CHECKOUT holds the other version, such as one made by `git worktree add CHECKOUT f00c906`. Each
pair is two new processes, one of each version, which play rounds in turn, TURNS turns each; its
ratio is that of the summed seconds. New processes, because where one's memory lies makes it some
per cent faster or slower for all its life. The interval is that of the pairs' median by order
statistics, at least 95 % where there are six pairs or more, else the range. `--write` writes
these rows to results/commits.md; others stay. W5/dense is a workload and a backend, W5 the loop's.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
import contextlib
import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "results" / "commits.md"
# Processor seconds that a turn takes at least, so that the clock's grain does not matter.
TURN = 1.0
TURNS = 3
ROWS = (
    "W1", "W2", "W3", "W4", "W5", "W5c",
    "W2/dense", "W3/dense", "W5/dense", "W4/channels-last", "W5c/channels-last",
)  # fmt: skip
# Rounds of these take minutes: fewer examples (W1, W5c), one client and two steps (W4).
QUICK = {"W1", "W4", "W5c"}


def backend_of(name: str) -> Any:
    """The backend of that name in one process, by whichever places the version has."""
    from fedshift.engine.backends import loop

    if name == "loop":
        return loop
    if name == "dense":
        try:
            from fedshift.engine.stacking.stacked import Stacked
        except ImportError:  # a version before that folder
            from fedshift.engine.stacked import Stacked
        return Stacked(dense=True)
    # By the name of the module in each version, the present one first.
    for place in ("one_by_one", "trainers", "levers"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"fedshift.engine.{place}")
            return module.channels_last(loop)
    raise SystemExit("this version has no channels_last")


def play(name: str, backend: str) -> None:
    """A process of one version: each line that it reads has it play so many rounds."""
    from workloads import WORKLOADS

    from fedshift import run

    workload = next(w for w in WORKLOADS if w.name == name)
    if name == "W4":
        workload = replace(workload, clients=1, local=replace(workload.local, steps=2))
    federation, algorithm = workload.federation(quick=name in QUICK)
    trained_by = backend_of(backend)
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


def compared(before: Path, row: str, pairs: int) -> dict[str, Any]:
    """The ratios of one row, pair by pair."""
    name, _, backend = row.partition("/")
    backend = backend or "loop"
    ratios = [ratio_of(before, name, backend) for _ in range(pairs)]
    low, high = interval(ratios)
    return {
        "workload": name, "backend": backend, "median": median(ratios), "low": low, "high": high
    }  # fmt: skip


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="loop", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play(options.play, options.backend)
        return
    if options.before is None:
        parser.error("--before CHECKOUT is missing")
    rows = options.only.split(",")
    if wrong := set(rows) - set(ROWS):
        parser.error(f"--only {','.join(sorted(wrong))}: allowed are {', '.join(ROWS)}")
    versions = short(options.before), short(ROOT)
    results = []
    for row in rows:
        results.append(compared(options.before.resolve(), row, options.pairs))
        print(json.dumps(results[-1]), flush=True)
    if options.write:
        PAGE.write_text(page(results, versions, options.pairs, PAGE.read_text()))


def short(checkout: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def page(
    results: Sequence[dict[str, Any]], versions: tuple[str, str], pairs: int, former: str
) -> str:
    """The page of results: these rows, and those of the former page that were not measured now."""
    lines = dict(re.findall(r"^(\| W\w+ \| [\w-]+) (\|.*)$", former, re.M))
    for r in results:
        spread = f"{r['low']:.3f} to {r['high']:.3f}"
        lines[f"| {r['workload']} | {r['backend']}"] = (
            f"| {versions[0]} | {versions[1]} | {pairs} | {r['median']:.3f} | {spread} |"
        )
    text = [
        "# Processor time of a round, now and before",
        "",
        "Ratio now / before: the median of so many pairs of processes that take turns. Below 1 is "
        "faster.",
        "W1 and W5c have a fifth of their examples; W4 has one client and two steps.",
        "",
        "    python benchmarks/commits.py --before CHECKOUT --write",
        "",
        "| workload | backend | before | now | pairs | median ratio | interval of the median |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
        *(f"{key} {rest}" for key, rest in sorted(lines.items())),
    ]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    main()
