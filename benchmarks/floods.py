"""Callers without a key against a federation's server: `python benchmarks/floods.py [--write]`.

Real processes: a server and three clients with TLS and keys, and while they train, callers from
this machine's other addresses (127.0.0.2 and more): bodies of 900 MB, said to be so long or in
pieces, headers without an end, and thousands of connections that say nothing, before TLS or after.
Measured are the SuperLink's memory (its peak above that just before) and the seconds until a new
caller from one more address has its answer. The run folder must be, byte for byte, that of
`fedshift run`.

`--bare` does the same to Flower's own `flower-superlink`, without a run. `--write` writes
results/floods.md.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flower_kills import (
    EXPERIMENT,
    FEDSHIFT,
    PATIENCE,
    clients_of,
    different,
    fedshift,
    over,
    processes_of,
    until,
)

from fedshift_deploy.federation import environment
from fedshift_deploy.processes import free_port, running, wait_for

OUT = Path(__file__).parents[1] / "results" / "floods.md"
CLIENTS, ROUNDS, MEGA = 3, 8, 10**6
PUSH = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-type: application/protobuf\r\n"
# Connections of one address: as many addresses as there must be.
EACH = 250


@dataclass(frozen=True)
class Flood:
    """What one kind of caller did: what it sent, the memory that it took, and what it held up."""

    name: str
    sent: float  # MB
    growth: float  # MB
    seconds: float  # until a new caller had its answer


def memory(pid: int) -> float:
    """MB of memory that a process has now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ValueError(pid)


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Callable[[], float]]:
    """The peak of a process's memory since the block began, above that at its beginning."""
    peaks, done = [memory(pid)], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peaks.append(memory(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(peaks) - peaks[0]
    finally:
        done.set()
        thread.join()


def connect(port: int, address: str = "127.0.0.2", *, tls: bool = True) -> socket.socket:
    """A connection from this address; whether its certificate is right is not asked."""
    plain = socket.create_connection(("127.0.0.1", port), 20.0, source_address=(address, 0))
    if not tls:
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(plain)


def send(port: int, head: bytes, piece: bytes, size: float, *, patience: float = 60.0) -> float:
    """Send `head` and pieces until so many MB are gone, or the server hangs up; the MB sent."""
    gone, end = 0, time.monotonic() + patience
    with contextlib.suppress(OSError), connect(port) as caller:
        caller.sendall(head)
        while gone < size * MEGA and time.monotonic() < end:
            caller.sendall(piece)
            gone += len(piece)
        caller.recv(1)
    return gone / MEGA


def declare(port: int, size: int) -> float:
    """A body whose length the headers say."""
    head = PUSH + b"content-length: %d\r\n\r\n" % (size * MEGA)
    return send(port, head, bytes(MEGA), size)


def pieces(port: int, size: int) -> float:
    """A body that comes in pieces, of no length."""
    piece = b"%x\r\n" % MEGA + bytes(MEGA) + b"\r\n"
    return send(port, PUSH + b"transfer-encoding: chunked\r\n\r\n", piece, size)


def headers(port: int, size: int) -> float:
    """Headers without an end."""
    line = b"x-filler: " + b"a" * 8000 + b"\r\n"
    return send(port, b"POST / HTTP/1.1\r\n", line, size)


def posts(port: int, size: int) -> float:
    """Thirty-two at once of those bodies."""
    sent: list[float] = []
    threads = [
        threading.Thread(target=lambda: sent.append(declare(port, size // 32))) for _ in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(sent)


def open_many(port: int, many: int, *, tls: bool) -> list[socket.socket]:
    """Connections that say nothing more."""
    opened: list[socket.socket] = []
    for k in range(many):
        with contextlib.suppress(OSError):
            opened.append(connect(port, f"127.0.1.{1 + k // EACH}", tls=tls))
    return opened


def answered(port: int) -> float:
    """Seconds until a new caller from an address of its own has an answer; infinity for none."""
    began = time.monotonic()
    with contextlib.suppress(OSError), connect(port, "127.0.2.1") as caller:
        caller.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        if caller.recv(1):
            return time.monotonic() - began
    return float("inf")


def floods(pid: int, port: int, size: int, many: int) -> list[Flood]:
    """One kind of caller after the other."""
    made = []
    bodies = {
        f"a body of {size} MB, its length said": declare,
        f"a body of {size} MB in pieces": pieces,
        f"{size} MB of headers": headers,
        f"{size} MB in 32 bodies at once": posts,
    }
    for name, attack in bodies.items():
        with watched(pid) as peak:
            sent = attack(port, size)
            made.append(Flood(name, sent, peak(), answered(port)))
        print(made[-1], flush=True)
    for tls in (False, True):
        name = f"{many} idle connections, {'after' if tls else 'before'} TLS"
        with watched(pid) as peak:
            opened = open_many(port, many, tls=tls)
            made.append(Flood(name, 0.0, peak(), answered(port)))
            for one in opened:
                one.close()
        print(made[-1], f"opened {len(opened)}", flush=True)
        time.sleep(1.0)
    return made


def init(place: Path) -> Path:
    """A federation's folder, and beside it the run folder of one process."""
    file, fed = place / "e.toml", place / "fed"
    file.write_text(EXPERIMENT.format(clients=CLIENTS, rounds=ROUNDS, method="fedavg", options=""))
    made = [FEDSHIFT, "deploy", "init", str(file), str(fed), "--host", "127.0.0.1"]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    return fed


def under_way(size: int, many: int, place: Path) -> tuple[list[Flood], str]:
    """The floods while a federation trains, and what is wrong with its run folder."""
    fed, run, port = init(place), place / "run", free_port()
    plain = [FEDSHIFT, "run", str(place / "e.toml"), "--out", str(place / "plain")]
    subprocess.run(plain, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with clients_of(fed, port):
        server = fedshift("deploy", "server", fed, "--port", str(port), "--out", run)
        if not until(lambda: over(run) >= 1):
            return [], "no round was played"
        (pid,) = processes_of(fed, port, "fedshift_deploy.guard")
        before = over(run)
        made = floods(pid, port, size, many)
        print(f"rounds {before} to {over(run)} were played meanwhile", flush=True)
        code = server.wait(PATIENCE)
    return made, f"exit code {code}" if code else different(run, place / "plain")


def bare(size: int, many: int, place: Path) -> list[Flood]:
    """The same to `flower-superlink` itself."""
    fed, port, log = init(place), free_port(), place / "log"
    arguments = [
        str(Path(sys.executable).with_name("flower-superlink")),
        "--host", "127.0.0.1", "--port", str(port),
        "--enable-supernode-auth", "--ssl-ca-certfile", str(fed / "ca.crt"),
        "--ssl-certfile", str(fed / "server.crt"), "--ssl-keyfile", str(fed / "server.key"),
    ]  # fmt: skip
    with running(arguments, environment(fed / "flower"), log) as process:
        wait_for("127.0.0.1", port, process, log)
        time.sleep(5.0)
        return floods(process.pid, port, size, many)


def table(made: list[Flood]) -> str:
    lines = ["| callers | sent, MB | memory, MB more | a new caller waits, s |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    for f in made:
        waits = "for ever" if f.seconds == float("inf") else f"{f.seconds:.2f}"
        lines.append(f"| {f.name} | {f.sent:.0f} | {f.growth:.1f} | {waits} |")
    return "\n".join(lines)


def main() -> int:
    """The tables; exit code 1 for memory above 50 MB, starved callers, or another run folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=900, help="MB")
    parser.add_argument("--many", type=int, default=5000, help="connections")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        made, wrong = under_way(arguments.size, arguments.many, Path(place))
    flower = "not run"
    if arguments.bare:
        with tempfile.TemporaryDirectory() as place:
            flower = table(bare(arguments.size, arguments.many, Path(place)))
    options = f"--size {arguments.size} --many {arguments.many}{' --bare' * arguments.bare}"
    result = wrong or "the same files"
    text = PAGE.format(
        options=options,
        table=table(made),
        result=result,
        flower=flower,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    print(text)
    if arguments.write:
        OUT.write_text(text)
    return int(bool(wrong) or any(f.growth > 50 or f.seconds > 5 for f in made))


PAGE = """# Callers without a key

`python benchmarks/floods.py {options} --write`: one server and three clients in processes of their
own, with TLS and keys, and while they train, callers that have no key. Memory is the peak of the
SuperLink's process above that before the callers came. The new caller comes from an address of its
own when the others are there. Run folder afterwards, beside that of the run in one process:
{result} (all but events.jsonl and report.html).

{table}

The same without fedshift's door: `flower-superlink` by itself, and no run under way. The rows are
one process's, one after the other: what one flood has left free is not counted again in the next.
The process may open {files:,} files; with fewer, idle connections leave none for new callers.

{flower}
"""

if __name__ == "__main__":
    sys.exit(main())
