"""How soon fedshift is there: `python benchmarks/startup.py [--quick]`.

Each is a new process, in turn, again and again; medians of wall and of processor time. A bare
interpreter is measured as well, since it is in all the others.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import results

SCRIPT = Path(sys.executable).with_name("fedshift")
COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import fedshift": [sys.executable, "-c", "import fedshift"],
    "import fedshift, all public names": [sys.executable, "-c", "from fedshift import *"],
    "fedshift --help": [str(SCRIPT), "--help"],
}


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of a process."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, os.times()
    return wall, sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    options = results.arguments(__doc__).parse_args()
    repeat = 3 if options.quick else 11
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(repeat):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    figures = {
        name: {
            "wall": statistics.median(wall for wall, _ in many),
            "processor": statistics.median(work for _, work in many),
        }
        for name, many in times.items()
    }
    for name, row in figures.items():
        print(f"{name:34} {row['wall']:6.2f} s, processor {row['processor']:.2f} s")
    results.save(options.out, figures, quick=options.quick)


if __name__ == "__main__":
    main()
