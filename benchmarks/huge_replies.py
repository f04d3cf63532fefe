"""A client's huge reply: `python benchmarks/huge_replies.py [--size 300] [--write]`.

Real processes: a server and one client with TLS and a key. The client answers round 1 with its
update and an array of so many MB beside it. Measured are the largest memory (VmHWM) of Flower's
SuperLink and of what plays the server of the run, with `training.max_reply` as it is and with a
limit that lets everything in. The run ends with exit code 4, as its only client has dropped out.

`--write` writes results/huge_replies.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fedshift.errors import FedshiftError  # noqa: E402
from fedshift.experiments.config.load import dumps, validate  # noqa: E402
from support.loopback import loopback  # noqa: E402

OUT = ROOT / "results" / "huge_replies.md"
NAMES = {"fedshift_deploy.guard": "SuperLink", "flwr-serverapp": "server of the run"}
OPEN = 1e6


def children(pid: int) -> dict[int, str]:
    """A process and all that came of it, with their commands."""
    listed = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    commands, pids = {int(p): args for p, _, args in rows}, {pid}
    while more := {int(p) for p, parent, _ in rows if int(parent) in pids} - pids:
        pids |= more
    return {p: commands[p] for p in pids if p in commands}


def peak(pid: int) -> float:
    """The largest memory that a process has had, in MB; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return 0.0


@contextlib.contextmanager
def peaks(folder: Path) -> Iterator[dict[str, float]]:
    """The largest memory of each of the server's processes while the block runs."""
    most, done = dict.fromkeys(NAMES.values(), 0.0), threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            everything = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True)
            guards = [
                int(line.split(None, 1)[0])
                for line in everything.stdout.splitlines()
                if "fedshift_deploy.guard" in line and str(folder) in line
            ]
            for guard in guards:
                for pid, command in children(guard).items():
                    for word, name in NAMES.items():
                        if word in command:
                            most[name] = max(most[name], peak(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def measure(size: int, times: float, place: Path) -> tuple[dict[str, float], float, str]:
    """(memory in MB by process, seconds of the run, how it ended) with this `max_reply`."""
    text = dumps(
        validate({
            "name": "run", "data": {"name": "fashion-mnist-mini", "limit": 300},
            "shift": {"kind": "iid", "clients": 1}, "model": {"name": "mlp", "hidden": [32]},
            "training": {"rounds": 1, "steps": 2, "max_reply": times},
        })
    )  # fmt: skip
    with loopback(place / "federation", text, 1) as fed, peaks(place / "federation") as most:
        fed.join(0)
        began, why = time.monotonic(), "it ended well"
        try:
            fed.play(place / "run", experiment=text, plan=f"swell-{size} 1 0", timeout=600.0)
        except FedshiftError as e:
            why = str(e)
        return dict(most), time.monotonic() - began, why


def main() -> int:
    """The table; exit code 1 where the limit saves less than half of the reply."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=300, help="MB")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows, taken, load = [], [], os.getloadavg()[0]
    for times in (8.0, OPEN):
        with tempfile.TemporaryDirectory() as place:
            most, seconds, why = measure(options.size, times, Path(place))
        limit = f"{times:g} times the model" if times < OPEN else "none (1,000,000 times)"
        cells = " | ".join(f"{mb:.0f}" for mb in most.values())
        rows.append(f"| {limit} | {cells} | {seconds:.0f} | {why} |")
        taken.append(sum(most.values()))
        print(rows[-1], flush=True)
    text = PAGE.format(size=options.size, rows="\n".join(rows), load=load)
    if options.write:
        OUT.write_text(text)
    return int(taken[1] - taken[0] < options.size / 2)


PAGE = """# A client's huge reply

`python benchmarks/huge_replies.py --size {size} --write`: a server and one client in processes of
their own, with TLS and keys, and a model of 100 kB. The client answers round 1 with {size} MB more
than its update. Memory is the largest that each process had (VmHWM). Seconds are those of the whole
run; when it began {load:.0f} processes wanted a core.

| training.max_reply | SuperLink, MB | server of the run, MB | seconds | the run's end |
| --- | --- | --- | --- | --- |
{rows}

The first piece that is refused ends the upload: the server is answered that the rest will not
come, and goes on without the client. Flower by itself waits until three minutes after the last one.
"""

if __name__ == "__main__":
    sys.exit(main())
