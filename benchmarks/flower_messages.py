"""What a message costs a client: `python benchmarks/flower_messages.py [--turns 2] [--write]`.

A federation of three clients in real processes, with TLS and keys, plays in turn with copies of one
process for each client's messages and, with FEDSHIFT_PLAIN=1, with a new process for each. Measured
are the seconds of a round and the processor time of a client's processes in it, from round 2 to the
last. `--write` writes results/flower_messages.md. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path

from flower_faults import Fed, federation, listed, parents

OUT = Path(__file__).parents[1] / "results" / "flower_messages.md"
CLIENTS, FIRST, LAST = 3, 2, 8
TICKS = os.sysconf("SC_CLK_TCK")
WAYS = {"copies of one process": "0", "a new process for each": "1"}


def processor_seconds(fed: Fed) -> float:
    """Of all processes of the clients, those that have ended included."""
    clients = {one.process.pid for one in fed.began[1:]}
    ticks = 0
    for pid in listed():
        with contextlib.suppress(OSError):
            if pid in clients or parents(pid) & clients:
                after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                # Its own time, and that of its children that it has waited for.
                ticks += sum(map(int, after[11:15]))
    return ticks / TICKS


def measure(plain: str) -> tuple[float, float]:
    """(seconds of a round, processor seconds of a client in it)."""
    os.environ["FEDSHIFT_PLAIN"] = plain
    points = []
    with federation(LAST, CLIENTS) as fed:
        fed.serve()
        fed.join(*range(CLIENTS))
        for number in (FIRST, LAST):
            if not fed.rounds(number):
                raise SystemExit(fed.began[0].words())
            points.append((time.monotonic(), processor_seconds(fed)))
    (began, used), (ended, used_then) = points
    rounds = LAST - FIRST
    return (ended - began) / rounds, (used_then - used) / rounds / CLIENTS


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    results: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(options.turns):
        for way, plain in WAYS.items():
            results[way].append(measure(plain))
            print(f"turn {turn + 1}, {way}: {results[way][-1]}", flush=True)
    medians = {
        way: [statistics.median(column) for column in zip(*pairs, strict=True)]
        for way, pairs in results.items()
    }
    rows = "\n".join(f"| {way} | {a:.1f} | {b:.2f} |" for way, (a, b) in medians.items())
    copies, new = medians.values()
    ratio = f"| ratio | {copies[0] / new[0]:.2f} | {copies[1] / new[1]:.2f} |"
    text = PAGE.format(turns=options.turns, rounds=LAST - FIRST, table=f"{rows}\n{ratio}")
    print(text)
    if options.write:
        OUT.write_text(text)
    return 0


PAGE = """# What a message costs a client

`python benchmarks/flower_messages.py --turns {turns} --write`: a server and three clients in real
processes on one machine of two cores, with TLS and keys, a small model. Means over {rounds}
rounds, and the median of the turns (`--turns`).

| a client's messages are answered by | seconds of a round | processor seconds of a client in it |
| --- | ---: | ---: |
{table}
"""

if __name__ == "__main__":
    sys.exit(main())
