"""A federation of real processes on this machine, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedshift.files import private
from fedshift_deploy.federation import Link, submit, superlink
from fedshift_deploy.place import make_place
from fedshift_deploy.processes import free_port
from support.deployed_apps import use_these

FEDSHIFT = str(Path(sys.executable).with_name("fedshift"))


def processes(word: str) -> dict[int, str]:
    """Running commands that contain `word`, by process id; without this process."""
    listed = subprocess.run(["ps", "-wweo", "pid,stat,args"], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    return {int(r[0]): r[2] for r in rows if word in r[2] and not r[1].startswith("Z")}


def gone(word: str, patience: float = 20.0) -> bool:
    """Whether all processes with this word in their command line end in time by themselves."""
    end = time.monotonic() + patience
    while processes(word):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


@dataclass
class Loopback:
    """A federation's folder, its port, and the clients that were started."""

    folder: Path
    port: int
    link: Link | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    heard: Callable[[dict[str, Any]], None] = lambda event: None
    slowest: float = 0.0
    clients: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    serving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def serve(self, host: str = "127.0.0.1") -> None:
        """Start a SuperLink, in the place of the one before if there was one."""
        self.serving.close()
        self.link = self.serving.enter_context(superlink(self.folder, host=host, port=self.port))

    def join(self, client: int, *more: str) -> subprocess.Popen[str]:
        """Start `fedshift deploy client` for one of them, which ends with this federation."""
        assert client not in self.clients
        self.clients[client] = self.joining(self.place(client), *more)
        return self.clients[client]

    def joining(self, place: Path, *more: str) -> subprocess.Popen[str]:
        """Start `fedshift deploy client` for a folder."""
        to = ["--server", f"127.0.0.1:{self.port}"]
        return subprocess.Popen(
            [FEDSHIFT, "deploy", "client", str(place), *to, *more],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ(),
        )  # fmt: skip

    def place(self, client: int) -> Path:
        return self.folder / "clients" / f"client-{client}"

    def leave(self, client: int) -> tuple[str, int]:
        """End a client; return its stderr and its exit code."""
        process = self.clients.pop(client)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        return process.communicate(timeout=60)[1], process.returncode

    def node(self, client: int) -> int:
        """The process id of a client's SuperNode."""
        key = str(self.place(client) / "key")
        pids = [pid for pid, args in processes(key).items() if "flower-supernode" in args]
        assert len(pids) == 1, pids
        return pids[0]

    def play(self, out: Path, **given: str | float) -> None:
        """Run the app once; its events go to `events`."""
        assert self.link is not None
        self.events.clear()
        waits = {"patience": 120.0, "timeout": 120.0}

        def listen(event: dict[str, Any]) -> None:
            self.events.append(event)
            self.slowest = max(self.slowest, event.get("seconds", 0.0))
            self.heard(event)

        submit(self.link, out, listen, **(waits | given))


@contextlib.contextmanager
def loopback(
    folder: Path, experiment: str, clients: int, host: str = "127.0.0.1"
) -> Iterator[Loopback]:
    """A SuperLink with the keys of all clients; the block decides which of them join."""
    make_place(folder, experiment, clients, ["localhost", "127.0.0.1"])
    use_these(folder)
    made = Loopback(folder, free_port())
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = environ()["PYTHONPATH"]
    try:
        # As the command does.
        with private(), made.serving:
            made.serve(host)
            yield made
    finally:
        for client in list(made.clients):
            made.leave(client)
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def environ() -> dict[str, str]:
    """The environment with this folder among those that Python imports from."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
