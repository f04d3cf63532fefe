"""Reading a table of 10^6 rows as a task, beside pandas' own reading: time and memory.

In a process each: pandas.read_csv of the whole file, Task.from_csv, and that with build().
Memory is the peak above what the imports take, over the size of the table's numbers in float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WAYS = {
    "pandas": "pandas.read_csv({path!r})",
    "read": "Task.from_csv({path!r}, client='site', label='y', target='s3')",
    "read and build": "Task.from_csv({path!r}, client='site', label='y', target='s3').build()",
}
SCRIPT = """
import json, time
import pandas, torch
from fedshift.tasks.task import Task
def peak():
    # Of this program alone: ru_maxrss would begin with what the process that started it had.
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) / 1024
before, start = peak(), time.process_time()
made = {call}
print(json.dumps([time.process_time() - start, peak() - before]))
"""


def write(path: Path, rows: int, columns: int) -> None:
    """A site, a label and numbers with 6 digits: up to 10,000 rows, which are repeated."""
    rng = np.random.default_rng(0)
    many = min(rows, 10_000)
    x = rng.normal(size=(many, columns - 2))
    site, y = rng.integers(0, 20, many), rng.integers(0, 3, many)
    lines = [
        f"s{site[i]},{'abc'[y[i]]}," + ",".join(f"{v:.6f}" for v in x[i]) + "\n"
        for i in range(many)
    ]
    with path.open("w") as file:
        names = [f"x{j}" for j in range(columns - 2)]
        file.write(",".join(["site", "y", *names]) + "\n")
        for start in range(0, rows, many):
            file.writelines(lines[: rows - start])


def measured(call: str) -> tuple[float, float]:
    """(seconds of processor time, MB above the imports), in a process of its own."""
    script = SCRIPT.replace("{call}", call)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
    return seconds, megabytes


def table(
    rows: int, columns: int, turns: int, ways: Sequence[str] = tuple(WAYS)
) -> dict[str, tuple[float, float]]:
    """By way, medians of (seconds, MB) over turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write(path, rows, columns)
        runs = [
            {name: measured(WAYS[name].format(path=str(path))) for name in ways}
            for _ in range(turns)
        ]
    return {name: tuple(np.median([run[name] for run in runs], axis=0)) for name in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    array = options.rows * options.columns * 4 / 2**20
    results = table(options.rows, options.columns, options.turns)
    base = results["pandas"][0]
    print(f"{options.rows:,} rows x {options.columns} columns; in float32 {array:.0f} MB")
    print("| way | seconds | times pandas | MB | times float32 |\n| --- | --- | --- | --- | --- |")
    for name, (seconds, megabytes) in results.items():
        print(
            f"| {name} | {seconds:.2f} | {seconds / base:.2f} | {megabytes:.0f} | "
            f"{megabytes / array:.2f} |"
        )


if __name__ == "__main__":
    main()
