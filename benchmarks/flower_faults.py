"""What an operator learns, and when: `python benchmarks/flower_faults.py [NAME ...] [--write]`.

Real processes on this machine: `fedshift deploy init`, a server, three clients, TLS and keys. One
fault after the other is made; measured are the seconds until the server or the client says so, its
words and its exit code, and whether a process is left over. Some faults need root (a full disk).

What is done is in `--folder`, and the same command goes on from there; `--again` forgets it first.
`--write` writes results/flower_faults.md, where rows of other faults stay. All of them take about
fifteen minutes. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedshift_deploy.keys import write_client_key
from fedshift_deploy.processes import free_port

OUT = Path(__file__).parents[1] / "results" / "flower_faults.md"
FEDSHIFT = str(Path(sys.executable).with_name("fedshift"))
CLIENTS, LONG = 3, 600.0
EXPERIMENT = """name = "run"
data.name = "fashion-mnist-mini"
shift = { kind = "sparsity", labels_per_client = 4, clients = CLIENTS }
model.name = "linear"
training = { rounds = ROUNDS, steps = 5, lr = 0.05, evaluate_every = 1 }
"""
# Loaded by Python before anything else: this process's clock is wrong by so many seconds.
CLOCK = """import datetime, time
wrong, right = {seconds}, time.time
time.time = lambda: right() + wrong
class Later(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(right() + wrong, tz)
datetime.datetime = Later
"""


@dataclass(frozen=True)
class Result:
    """What came of one fault. code: None where the command goes on; load: of the machine."""

    fault: str
    by: str
    seconds: float
    code: int | None
    words: str
    left: int = 0
    load: float = 0.0


@dataclass
class Command:
    """A command in the background, and what it says."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)

    def words(self) -> str:
        """All that it has written to stderr, in one line each."""
        return self.log.read_text(errors="replace")

    def until(self, pattern: str, seconds: float = LONG) -> str:
        """The first line that has these words; "" if none comes in time or the command ends."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            over = self.process.poll() is not None
            for line in self.words().splitlines():
                if re.search(pattern, line):
                    return line.strip()
            if over:
                break
            time.sleep(0.05)
        return ""

    def code(self, seconds: float = LONG) -> int | None:
        """Its exit code; None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None


@dataclass
class Fed:
    """A federation's folder, its port, and the commands that were started."""

    place: Path
    port: int
    began: list[Command] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.place / "fed"

    def client(self, number: int) -> Path:
        """A client's folder."""
        return self.folder / "clients" / f"client-{number}"

    def start(self, *args: str | Path, clock: float = 0.0) -> Command:
        """A command, with a wrong clock perhaps."""
        log = self.place / f"{len(self.began)}.log"
        env = dict(os.environ)
        if clock:
            shifted = Path(tempfile.mkdtemp(dir=self.place))
            (shifted / "sitecustomize.py").write_text(CLOCK.format(seconds=clock))
            env["PYTHONPATH"] = os.pathsep.join([str(shifted), env.get("PYTHONPATH", "")])
        with log.open("wb") as f:
            made = subprocess.Popen([FEDSHIFT, *map(str, args)], stdout=f, stderr=f, env=env)
        self.began.append(Command(made, log))
        return self.began[-1]

    def serve(self, *more: str | Path) -> Command:
        """The server."""
        return self.start("deploy", "server", self.folder, "--port", str(self.port), *more)

    def join(self, *numbers: int, patience: float = LONG, clock: float = 0.0) -> list[Command]:
        """Clients by their numbers."""
        return [self.joining(self.client(i), patience, clock) for i in numbers]

    def joining(self, place: Path, patience: float = LONG, clock: float = 0.0) -> Command:
        """A client by its folder."""
        to = ["--server", f"127.0.0.1:{self.port}", "--patience", str(patience)]
        return self.start("deploy", "client", place, *to, clock=clock)

    def end(self) -> None:
        """End all commands in order, as an operator would."""
        for one in self.began:
            one.process.send_signal(signal.SIGTERM)
        for one in self.began:
            one.process.wait(60)

    def rounds(self, wanted: int, seconds: float = LONG) -> bool:
        """Wait until so many rounds are over."""
        return self.event(lambda e: e["event"] == "round" and e["round"] >= wanted, seconds) != {}

    def event(self, like: Callable[[dict], bool], seconds: float = LONG) -> dict:
        """The first event of the run that is so."""
        end, path = time.monotonic() + seconds, self.folder / "run" / "events.jsonl"
        while time.monotonic() < end:
            if path.exists():
                for line in path.read_text().split("\n")[:-1]:
                    if like(event := json.loads(line)):
                        return event
            time.sleep(0.05)
        return {}

    def pids(self, word: str) -> list[int]:
        """This federation's processes by a word of their commands."""
        ours = (str(self.place), f":{self.port}")
        return [p for p, a in listed().items() if word in a and any(o in a for o in ours)]

    def below(self, number: int, word: str) -> list[int]:
        """Processes below a client's SuperNode by a word of their commands."""
        key = str(self.client(number) / "key")
        nodes = [p for p, a in listed().items() if key in a and "flower-supernode" in a]
        return [p for p, a in listed().items() if word in a and parents(p) & set(nodes)]


def listed() -> dict[int, str]:
    """Commands of all processes by id."""
    out = subprocess.run(["ps", "-wweo", "pid,stat,args"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in out.splitlines()[1:]]
    return {int(r[0]): r[2] for r in rows if len(r) == 3 and r[1][0] != "Z"}


def parents(pid: int) -> set[int]:
    """The process and those above it."""
    above = {pid}
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        above.add(pid)
    return above


def kill(pids: Sequence[int]) -> float:
    """`kill -9`; the time of it."""
    if not pids:
        raise RuntimeError("there is no such process to kill")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


@contextlib.contextmanager
def federation(rounds: int = 4, clients: int = CLIENTS) -> Iterator[Fed]:
    """A new federation; its commands end with the block."""
    with tempfile.TemporaryDirectory(prefix="fedshift-faults-") as place:
        made = Fed(Path(place), free_port())
        file = made.place / "e.toml"
        text = EXPERIMENT.replace("ROUNDS", str(rounds)).replace("CLIENTS", str(clients))
        file.write_text(text)
        init = [FEDSHIFT, "deploy", "init", str(file), str(made.folder), "--host", "127.0.0.1"]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
        try:
            yield made
        finally:
            for one in made.began:
                one.process.send_signal(signal.SIGTERM)
            for one in made.began:
                one.process.wait(60)


def left(fed: Fed, seconds: float = 20.0) -> int:
    """Processes of the server that are still there."""
    end = time.monotonic() + seconds
    words = ("fedshift_deploy.guard", "flower-superexec --root", "flwr-serverapp")
    while alive := [p for word in words for p in fed.pids(word)]:
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return len(alive)


def server_process(name: str, word: str) -> Result:
    """`kill -9` of one of the server's processes, after round 1."""
    with federation(30) as fed:
        server = fed.serve()
        fed.join(*range(CLIENTS))
        assert fed.rounds(1), "no round was played"
        began = kill(fed.pids(word))
        words = server.until("error: ")
        seconds, code = time.monotonic() - began, server.code()
        return Result(f"{name} killed", "server", seconds, code, words, left(fed))


def client_process(name: str, word: str) -> Result:
    """`kill -9` of a client's SuperNode, or below it: the client joins again, and takes part."""
    with federation(30) as fed:
        fed.serve("--timeout", "300")
        clients = fed.join(*range(CLIENTS))
        assert fed.rounds(1), "no round was played"
        began = kill(fed.below(1, word))
        words = clients[1].until("SuperNode")
        seconds = time.monotonic() - began
        lost = fed.event(lambda e: e["event"] == "round" and bool(e.get("dropped")))
        back = fed.event(lambda e: e["event"] == "round" and e["round"] > lost["round"]
                         and 1 in e["clients"])  # fmt: skip
        words += f" / back in round {back.get('round')}, lost in {lost.get('round')}"
        return Result(f"{name} killed", "client", seconds, clients[1].process.poll(), words)


def clientapp() -> Result:
    """`kill -9` of the process that answers one message."""
    with federation(30) as fed:
        server = fed.serve("--timeout", "300")
        fed.join(*range(CLIENTS))
        assert fed.rounds(1), "no round was played"
        lost: dict = {}
        began = time.monotonic()
        while not lost and server.process.poll() is None:
            # One that had just answered is no fault: the next one is killed then.
            if apps := fed.below(1, "flwr-clientapp"):
                began = kill(apps)
            # It trains, or scores the model.
            lost = fed.event(lambda e: e["event"] in ("dropped", "unscored"), 5.0)
        seconds = time.monotonic() - began
        return Result("ClientApp killed", "server", seconds, server.process.poll(),
                      str(lost.get("reason")))  # fmt: skip


def at_the_start(fault: str, by: str, begin: Callable[[Fed], Command], words: str) -> Result:
    """A fault that one command shows by itself."""
    with federation() as fed:
        command = begin(fed)
        line = command.until(words)
        seconds = time.monotonic() - command.began
        code = command.code(15.0)
        return Result(fault, by, seconds, code, line)


def port_in_use(fed: Fed) -> Command:
    other = fed.serve()
    while not fed.pids("fedshift_deploy.guard"):
        time.sleep(0.1)
    time.sleep(5.0)
    shutil.copytree(fed.folder, fed.place / "copy", ignore=shutil.ignore_patterns("in-use"))
    assert other.process.poll() is None
    return fed.start("deploy", "server", fed.place / "copy", "--port", str(fed.port))


def second_server(fed: Fed) -> Command:
    fed.serve()
    while not fed.pids("fedshift_deploy.guard"):
        time.sleep(0.1)
    return fed.start("deploy", "server", fed.folder, "--port", str(free_port()))


def second_client(fed: Fed) -> Command:
    fed.join(0)
    time.sleep(8.0)
    return fed.join(0)[0]


def up(fed: Fed) -> None:
    """A server with all keys registered: another client has joined."""
    fed.serve()
    fed.join(2)
    log = fed.folder / "superlink.log"
    while not log.exists() or "Activated" not in log.read_text(errors="replace"):
        time.sleep(0.1)


def copied_key(fed: Fed) -> Command:
    up(fed)
    shutil.copytree(fed.client(2), fed.place / "copy", ignore=shutil.ignore_patterns("in-use"))
    return fed.joining(fed.place / "copy", 5.0)


def unknown_key(fed: Fed) -> Command:
    up(fed)
    for name in ("key", "key.pub"):
        (fed.client(0) / name).unlink()
    write_client_key(fed.client(0) / "key")
    return fed.join(0, patience=5.0)[0]


def wrong_authority(fed: Fed) -> Command:
    up(fed)
    init = [FEDSHIFT, "deploy", "init", str(fed.place / "e.toml"), str(fed.place / "other")]
    subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
    shutil.copyfile(fed.place / "other" / "ca.crt", fed.client(0) / "ca.crt")
    return fed.join(0)[0]


def clock(seconds: float) -> Callable[[Fed], Command]:
    def begin(fed: Fed) -> Command:
        up(fed)
        return fed.join(0, patience=5.0, clock=seconds)[0]

    return begin


def full_disk() -> Result:
    """The federation's folder is on a disk of 2 MB that fills up after round 1."""
    with federation(30) as fed:
        original = fed.place / "kept"
        fed.folder.rename(original)
        fed.folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(fed.folder)]
        subprocess.run(mount, check=True)
        try:
            shutil.copytree(original, fed.folder, dirs_exist_ok=True)
            server = fed.serve()
            fed.join(*range(CLIENTS))
            assert fed.rounds(1), "no round was played"
            with contextlib.suppress(OSError), (fed.folder / "filler").open("wb") as f:
                while True:
                    f.write(b"0" * 4096)
                    f.flush()
            began = time.monotonic()
            words = server.until("error: ")
            seconds, code = time.monotonic() - began, server.code()
            return Result("disk full", "server", seconds, code, words, left(fed))
        finally:
            for one in fed.began:
                one.process.send_signal(signal.SIGTERM)
            for one in fed.began:
                one.process.wait(60)
            subprocess.run(["umount", "-l", str(fed.folder)], check=True)


def missing_client() -> Result:
    """One of three does not come."""
    with federation() as fed:
        server = fed.serve("--patience", "20")
        fed.join(0, 2)
        began = time.monotonic()
        words = server.until("error: ")
        return Result("a client is missing (--patience 20)", "server", time.monotonic() - began,
                      server.code(), words, left(fed))  # fmt: skip


def restarted() -> Result:
    """The server is ended and started again: a client waits for it."""
    with federation(30) as fed:
        server = fed.serve()
        clients = fed.join(*range(CLIENTS))
        # A round is reported before its checkpoint is written: after two there is one.
        assert fed.rounds(2), "no two rounds were played"
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        words = clients[0].until("server has ended|cannot be reached|failed")
        seconds = time.monotonic() - began
        server.code()
        before = len((fed.folder / "run" / "events.jsonl").read_text().splitlines())
        fed.serve("--resume", fed.folder / "run")
        end = time.monotonic() + LONG
        path = fed.folder / "run" / "events.jsonl"
        while time.monotonic() < end and not any(
            '"round"' in line for line in path.read_text().splitlines()[before:]
        ):
            time.sleep(0.1)
        words += f" / the run went on {time.monotonic() - began:.0f} s after the end"
        return Result("server restarted", "client", seconds, clients[0].process.poll(), words)


REFUSED = "error: |does not let"
FAULTS: dict[str, Callable[[], Result]] = {
    "superlink": lambda: server_process("SuperLink", "fedshift_deploy.guard"),
    "superexec": lambda: server_process("SuperExec", "flower-superexec --root"),
    "serverapp": lambda: server_process("ServerApp", "flwr-serverapp"),
    "supernode": lambda: client_process("SuperNode", "flower-supernode"),
    "client-superexec": lambda: client_process("a client's SuperExec", "flower-superexec"),
    "clientapp": clientapp,
    "port": lambda: at_the_start("port in use", "server", port_in_use, "error: "),
    "disk": full_disk,
    "ahead": lambda: at_the_start("clock 60 s ahead", "client", clock(60.0), REFUSED + "|clock"),
    "behind": lambda: at_the_start("clock 400 s behind", "client", clock(-400.0),
                                   REFUSED + "|clock"),
    "authority": lambda: at_the_start("another ca.crt", "client", wrong_authority, "error: "),
    "unknown": lambda: at_the_start("unknown key", "client", unknown_key, REFUSED),
    "copied": lambda: at_the_start("the same key twice", "client", copied_key, REFUSED),
    "client": lambda: at_the_start("a client's folder twice", "client", second_client, "error: "),
    "server": lambda: at_the_start("two servers of a folder", "server", second_server, "error: "),
    "missing": missing_client,
    "restarted": restarted,
}  # fmt: skip


def page(results: Sequence[Result], before: str = "") -> str:
    """The page: rows of the page `before`, with those of results in their place or at the end."""
    rows = {line.split(" | ")[0]: line for line in before.splitlines() if line.startswith("| ")}
    for r in results:
        words = re.sub(r"/tmp/\S*?/(fed|copy)", "fed", r.words).replace("|", "/")
        words = re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", words)
        code = "goes on" if r.code is None else str(r.code)
        seconds = f"{r.seconds:.1f} | {r.load:.0f}" if r.load else f"{r.seconds:.1f} | "
        rows[f"| {r.fault}"] = f"| {r.fault} | {r.by} | {seconds} | {code} | {r.left} | {words} |"
    head = [HEAD, "| --- | --- | --- | --- | --- | --- | --- |"]
    faults = [row for first, row in rows.items() if first not in ("| fault", "| ---")]
    return PAGE.format(table="\n".join([*head, *faults]))


HEAD = "| fault | said by | seconds | load | exit code | left over | words |"
PAGE = """# Faults of a federation, and what an operator learns

`python benchmarks/flower_faults.py --write`: one server and three clients on one machine of two
cores, with TLS and keys. Seconds are from the fault until the words are there; where a command
shows the fault by itself they are from its start, Python's own start of seconds included. `left
over`: processes of the server that are there 20 s after its end. `load`: processes that wanted a
core when it began; where it is missing, other work kept both cores busy (8 to 40).

{table}
"""


def main() -> int:
    """The table; exit code 1 where nothing was reported, or processes were left over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/flower_faults"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or FAULTS:
        path = options.folder / f"{name}.json"
        if options.again or not path.exists():
            load = os.getloadavg()[0]
            path.write_text(json.dumps(asdict(FAULTS[name]()) | {"load": load}))
        print(name, path.read_text(), flush=True)
    paths = [options.folder / f"{name}.json" for name in FAULTS]
    results = [Result(**json.loads(p.read_text())) for p in paths if p.exists()]
    if options.write:
        OUT.write_text(page(results, OUT.read_text() if OUT.exists() else ""))
    return int(any(not r.words or r.left for r in results))


if __name__ == "__main__":
    sys.exit(main())
