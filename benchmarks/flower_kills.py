"""A federation's server killed: `python benchmarks/flower_kills.py [--points 12] [--write]`.

Real processes: `fedshift deploy init`, three clients and a server on this machine, with TLS and
keys. After a random round and a random moment more, `kill -9` ends one of the server's three
processes in turn: `fedshift deploy server`, Flower's SuperLink, or what plays the server of the
run. Then `fedshift deploy server --resume` goes on, and the run folder must be, byte for byte, that
of `fedshift run`.

`--write` writes results/flower_kills.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedshift_deploy.processes import free_port

OUT = Path(__file__).parents[1] / "results" / "flower_kills.md"
FEDSHIFT = str(Path(sys.executable).with_name("fedshift"))
METHODS = ("fedavg", "scaffold", "ditto", "feddisk", "labelset_scaffold", "fedpals")
VICTIMS = ("deploy server", "fedshift_deploy.guard", "flwr-serverapp")
ROUNDS, CLIENTS, PATIENCE = 8, 3, 300.0
OPTIONS = {"fedpals": "ess = 0.9", "feddisk": "density_rounds = 2\nhidden = [8]"}
EXPERIMENT = """name = "run"
data = {{ name = "fashion-mnist-mini", validation = {validation} }}
shift = {{ kind = "sparsity", labels_per_client = 4, clients = {clients} }}
model.name = "linear"
training = {{ rounds = {rounds}, steps = 5, lr = 0.05, evaluate_every = 2 }}
[method]
name = "{method}"
{options}
"""


@dataclass(frozen=True)
class Point:
    """What came of one kill: the rounds that were over then, and from where the run went on.

    seconds  until the server that went on began the run: after all clients had joined again
    """

    method: str
    victim: str
    over: int
    after: int
    seconds: float
    wrong: str


def fedshift(*args: str | Path) -> subprocess.Popen[bytes]:
    """A command in the background."""
    return subprocess.Popen([FEDSHIFT, *map(str, args)], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL)  # fmt: skip


@contextlib.contextmanager
def clients_of(fed: Path, port: int) -> Iterator[None]:
    """All clients, which wait for one server after the other."""
    server = f"127.0.0.1:{port}"
    joined = [
        fedshift("deploy", "client", fed / "clients" / f"client-{i}", "--server", server)
        for i in range(CLIENTS)
    ]
    try:
        yield
    finally:
        for one in joined:
            one.send_signal(signal.SIGTERM)
        for one in joined:
            one.wait(60)


def events(run: Path) -> list[dict[str, object]]:
    """What has happened so far."""
    try:
        lines = (run / "events.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def over(run: Path) -> int:
    """Rounds that are over."""
    return sum(one["event"] == "round" for one in events(run))


def until(true: object, seconds: float = PATIENCE) -> bool:
    """Wait for a function to become true."""
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def processes_of(fed: Path, port: int, victim: str) -> list[int]:
    """The processes of this federation's server by a word of their commands."""
    listed = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 1) for line in listed.stdout.splitlines()[1:]]
    ours = (str(fed), f":{port}", f"--port {port}")
    return [int(p) for p, a in rows if victim in a and any(word in a for word in ours)]


def different(run: Path, plain: Path) -> str:
    """The files of two run folders that are not the same, but for times and the folder's name."""
    names = {p.name for folder in (run, plain) for p in folder.iterdir() if p.is_file()}

    def read(folder: Path, name: str) -> bytes:
        return (folder / name).read_bytes() if (folder / name).exists() else b""

    excluded = {"events.jsonl", "report.html"}
    return ", ".join(sorted(n for n in names - excluded if read(run, n) != read(plain, n)))


def play(method: str, victim: str, source: random.Random, place: Path) -> Point:
    """Kill one process of a server once, and go on."""
    file, fed, run, port = place / "e.toml", place / "fed", place / "run", free_port()
    options = OPTIONS.get(method, "")
    file.write_text(
        EXPERIMENT.format(
            clients=CLIENTS,
            rounds=ROUNDS,
            method=method,
            options=options,
            # Clients of private label sets may not score the whole model.
            validation=0 if method.startswith("labelset") else 0.2,
        )
    )
    subprocess.run([FEDSHIFT, "run", file, "--out", place / "plain"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    init = [FEDSHIFT, "deploy", "init", str(file), str(fed), "--host", "127.0.0.1"]
    subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
    serve = ("deploy", "server", fed, "--port", str(port), "--patience", str(PATIENCE))
    with clients_of(fed, port):
        server, wanted = fedshift(*serve, "--out", run), source.randint(1, ROUNDS - 2)
        if not until(lambda: over(run) >= wanted):
            return Point(method, victim, over(run), 0, 0.0, "it never came so far")
        time.sleep(source.uniform(0.0, 1.5))
        for pid in processes_of(fed, port, victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.wait(PATIENCE)
        done, before, began = over(run), len(events(run)), time.monotonic()
        if (run / "summary.json").exists():
            return Point(method, victim, done, done, 0.0, different(run, place / "plain"))
        until(lambda: not processes_of(fed, port, "fedshift_deploy.guard"), 60)
        again = fedshift(*serve, "--resume", run)
        until(lambda: any("after" in one for one in events(run)[before:]))
        seconds = time.monotonic() - began
        code = again.wait(PATIENCE)
    starts = [one["after"] for one in events(run)[before:] if "after" in one]
    after = int(str(starts[0])) if starts else 0
    wrong = different(run, place / "plain") if code == 0 else f"exit code {code}"
    return Point(method, victim, done, after, seconds, wrong)


def main() -> int:
    """The table; exit code 1 if a run did not go on to the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    source, points = random.Random(options.seed), list[Point]()
    for k in range(options.points):
        with tempfile.TemporaryDirectory() as place:
            method, victim = METHODS[k % len(METHODS)], VICTIMS[(k + k // 6) % len(VICTIMS)]
            points.append(play(method, victim, source, Path(place)))
        print(points[-1], flush=True)
    lines = ["| method | killed | rounds over | went on after | seconds | result |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    lines += [
        f"| {p.method} | {p.victim} | {p.over} | {p.after} | {p.seconds:.1f} | "
        f"{p.wrong or 'the same files'} |"
        for p in points
    ]
    text = PAGE.format(
        points=options.points, seed=options.seed, rounds=ROUNDS, table="\n".join(lines)
    )
    print(text)
    if options.write:
        OUT.write_text(text)
    return int(any(p.wrong or p.over - p.after > 1 for p in points))


PAGE = """# A federation's server, killed

`python benchmarks/flower_kills.py --points {points} --seed {seed} --write`: one server and three
clients in processes of their own, with TLS and keys, {rounds} rounds; `kill -9` of one of the
server's processes after a random round and up to 1.5 s more; `deploy server --resume`. Seconds are
those until the run went on, all clients having joined again. `the same files`: all but events.jsonl
and report.html are, byte for byte, those of the run in one process.

{table}
"""

if __name__ == "__main__":
    sys.exit(main())
