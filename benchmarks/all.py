"""All benchmarks in turn, and the page of their figures: `python benchmarks/all.py [--quick]`.

Each runs in a process of its own and leaves a JSON file in --out; the page is drawn from these
files alone, so that --draw draws it again. Without --quick the page is results/benchmarks.md,
and the files lie beside it in results/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import page

HERE = Path(__file__).parent
PAGE = HERE.parent / "results" / "benchmarks.md"
FILES = PAGE.with_suffix("")
# Those that take one core play W4 for three minutes a round. Named by as many as engine.py takes.
CORES = os.cpu_count() or 1
SPREAD = ";".join(f"{kind}{CORES} workers" for kind in ("", "channels-last, "))
# In this order: the longest first, what needs most memory last. A round of W4 takes minutes.
PARTS: dict[str, tuple[str, ...]] = {
    "engine": ("engine.py", "--only", "W1,W2,W3,W5"),
    "sparse": ("engine.py", "--only", "W5c", "--repeat", "9"),
    "deep": ("engine.py", "--only", "W4", "--repeat", "1", "--contenders", SPREAD),
    "methods": ("methods.py",),
    "growth": ("growth.py",),
    "registered": ("registered.py",),
    "precision": ("precision.py",),
    "startup": ("startup.py",),
    "aggregation": ("aggregation.py",),
    "states": ("states.py",),
}
# Made by peers/run.py, which takes an environment for each; and by earlier versions on other
# machines, the second with forked contenders.
OTHERS = ("engine-earlier", "engine-elsewhere", "peers", "peers-deep")


def run(name: str, out: Path, quick: bool) -> None:
    """One benchmark, with its figures in `out`. A failure ends it all."""
    script, *options = PARTS[name]
    command = [sys.executable, str(HERE / script), *options, "--out", str(out / f"{name}.json")]
    print(f"== {name}", flush=True)
    began = time.perf_counter()
    done = subprocess.run([*command, *(["--quick"] if quick else [])])
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}")
    print(f"== {name} took {time.perf_counter() - began:.0f} s", flush=True)


def figures(out: Path) -> dict[str, Any]:
    """What the benchmarks left, by name."""
    paths = {name: out / f"{name}.json" for name in (*PARTS, *OTHERS)}
    return {k: json.loads(path.read_text()) for k, path in paths.items() if path.exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller, to try it out")
    parser.add_argument("--only", default="", help="as in registered,startup")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is there")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "benchmarks")
    parser.add_argument("--page", type=Path, help="where to write the page")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else PARTS
    if odd := sorted(set(chosen) - set(PARTS)):
        raise SystemExit(f"unknown: {', '.join(odd)}; there are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in () if options.draw else chosen:
        run(name, options.out, options.quick)
    results = figures(options.out)
    # Numbers of a trial are no results.
    trial = options.quick or any(one["quick"] for one in results.values())
    target = options.page or (options.out / "benchmarks.md" if trial else PAGE)
    if target == PAGE:  # what was not run anew stays as it was
        results = figures(FILES) | results
    target.write_text(page.drawn(results))
    if target == PAGE:
        FILES.mkdir(exist_ok=True)
        for name, left in results.items():
            (FILES / f"{name}.json").write_text(json.dumps(left, indent=1) + "\n")
    print(f"page: {target}")


if __name__ == "__main__":
    main()
