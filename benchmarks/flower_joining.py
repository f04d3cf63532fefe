"""Clients that join at once: `python benchmarks/flower_joining.py [--clients 50] [--write]`.

Real processes on this machine: `deploy server` and so many `deploy client`, all started together,
with TLS and keys. Measured are the seconds until all have joined, and the memory of all processes
then: proportional shares (PSS), so that what they share counts once. `--most` ends it before the
machine is full: 50 clients take about 11 GB.

Results are kept in `--folder`, one file per number of clients, and `--write` writes
results/flower_joining.md with all of them. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from pathlib import Path

from flower_faults import Fed, federation, listed, parents

OUT = Path(__file__).parents[1] / "results" / "flower_joining.md"
SECONDS = 3600.0


def memory(pids: list[int]) -> float:
    """PSS of these processes in MB."""
    kilobytes = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            line = re.search(r"^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
            kilobytes += int(line[1]) if line else 0
    return kilobytes / 1024


def below(fed: Fed) -> dict[str, list[int]]:
    """All processes of the server, and of the clients."""
    server, *clients = (one.process.pid for one in fed.began)
    above = {pid: parents(pid) for pid in listed()}
    return {
        "server": [pid for pid, line in above.items() if server in line],
        "clients": [pid for pid, line in above.items() if line & set(clients)],
    }


def joined(fed: Fed) -> int:
    """How many clients the server's log says have joined."""
    log = fed.folder / "superlink.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return len(set(re.findall(r"Activated node_id=(\d+)", text)))


def measure(clients: int, most: float) -> dict[str, float]:
    """Start them all, and wait until they have joined."""
    with federation(1, clients) as fed:
        began = time.monotonic()
        fed.serve("--patience", str(SECONDS))
        fed.join(*range(clients), patience=SECONDS)
        while joined(fed) < clients:
            used = sum(memory(pids) for pids in below(fed).values())
            if used > most or time.monotonic() - began > SECONDS:
                raise SystemExit(f"{joined(fed)} of {clients} have joined, with {used:.0f} MB")
            time.sleep(1.0)
        seconds = time.monotonic() - began
        shares = {who: memory(pids) for who, pids in below(fed).items()}
        refused = sum("does not let this client in" in one.words() for one in fed.began)
        return {"clients": clients, "seconds": seconds, "refused": refused, **{
            f"{who} MB": megabytes for who, megabytes in shares.items()
        }}  # fmt: skip


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--most", type=float, default=18000.0, help="MB")
    parser.add_argument("--folder", type=Path, default=Path("runs/flower_joining"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.clients}.json"
    if not path.exists():
        path.write_text(json.dumps(measure(options.clients, options.most)))
    results = sorted(
        (json.loads(p.read_text()) for p in options.folder.glob("*.json")),
        key=lambda r: r["clients"],
    )
    rows = "\n".join(
        f"| {r['clients']} | {r['seconds']:.0f} | {r['refused']} | {r['server MB']:.0f} | "
        f"{r['clients MB']:.0f} | {r['clients MB'] / r['clients']:.0f} |"
        for r in results
    )
    text = PAGE.format(table=rows)
    print(text)
    if options.write:
        OUT.write_text(text)
    return 0


PAGE = """# Clients that join at once

`python benchmarks/flower_joining.py --clients N --write`, one machine of two cores: a server and N
clients, all started in one moment, with TLS and keys. Memory is the proportional share (PSS) of all
processes once all have joined, before the first round. `refused`: clients that said so on the way.

| clients | seconds until all have joined | refused | server MB | clients MB | MB per client |
| --- | --- | --- | --- | --- | --- |
{table}
"""

if __name__ == "__main__":
    sys.exit(main())
