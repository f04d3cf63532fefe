"""Serving a federation and joining one, over Flower's SuperLink, SuperNodes and `flwr`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedshift.deploy.keys import check_certificate
from fedshift.deploy.place import clients_of
from fedshift.deploy.processes import asked, check_port, command, free_port, running, wait_for
from fedshift.errors import InputError, TrainingError
from fedshift.flower.quiet import quiet_environment

POLL, STATUS = 0.5, 15.0
NAME = "federation"
Listener = Callable[[dict[str, Any]], None]


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: quiet, and with this Python's commands first."""
    home.mkdir(exist_ok=True)
    beside = str(Path(command("flwr")).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return {**os.environ, **quiet_environment(home), "PATH": path}


def serve(
    folder: Path, out: Path, *, host: str, port: int, timeout: float, listen: Listener
) -> None:
    """Run the experiment of a federation's folder once all its clients have joined.

    Starts a SuperLink with TLS that knows the clients' keys and no others, submits the run, passes
    its events to `listen`, and ends what it has started. The run's folder is `out`. Raises
    InputError for certificates and ports that cannot be used, TrainingError for a run that failed.
    """
    places, folder = clients_of(folder), folder.absolute()
    check_port(host, port)
    here = f"{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{port}"
    env = environment(folder / "flower")
    ours = f'address = "{here}"\nroot-certificates = "{folder / "ca.crt"}"\n'
    told = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n{ours}'
    (folder / "flower" / "config.toml").write_text(told, encoding="utf-8")
    log = folder / "superlink.log"
    arguments = [
        command("flower-superlink"), "--host", host, "--port", str(port), "--enable-supernode-auth",
        "--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt"),
        "--ssl-keyfile", str(folder / "server.key"),
    ]  # fmt: skip
    with running(arguments, env, log) as superlink:
        wait_for(*_address(here), superlink, log)
        flwr = command("flwr")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda place: _register(flwr, place, env), places))
        given = f'out="{out.absolute()}" timeout={timeout}'
        submit = [flwr, "run", str(folder / "app"), NAME, "--run-config", given]
        run = str(asked([*submit, "--format", "json"], env)["run-id"])
        _follow(run, out, env, log, listen)


def _register(flwr: str, place: Path, env: Mapping[str, str]) -> None:
    arguments = [flwr, "supernode", "register", str(place / "key.pub"), NAME]
    asked([*arguments, "--name", place.name, "--format", "json"], env)


def join(
    place: Path,
    server: str,
    *,
    patience: float = 300.0,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Be a client of the federation at `server` ("host:port") until it is interrupted.

    `place` is the client's folder, as `fedshift deploy init` made it. A client that comes before
    its key is known at the server is refused; it tries again for `patience` seconds. Returns the
    SuperNode's exit code. Raises InputError for a folder or certificate that cannot be used.
    """
    try:
        about = json.loads((place / "client.json").read_text(encoding="utf-8"))
        which = f"partition-id={int(about['partition'])} num-partitions={int(about['partitions'])}"
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{place}: no client's folder; give one of clients/client-0, ... that "
            "`fedshift deploy init` made"
        ) from None
    check_certificate(place / "ca.crt")
    _address(server)
    arguments = [
        command("flower-supernode"), "--superlink", server, "--host", "127.0.0.1",
        "--port", str(free_port()), "--root-certificates", str(place / "ca.crt"),
        "--auth-supernode-private-key", str(place / "key"), "--node-config", which,
    ]  # fmt: skip
    env = environment(place.absolute() / "flower")
    until = time.monotonic() + patience
    while True:
        began = time.monotonic()
        with running(arguments, env, place / "supernode.log") as node:
            code = node.wait()
        # One that has worked for a while was not refused.
        if not code or time.monotonic() > until or time.monotonic() - began > patience / 2:
            return code
        say(f"refused (exit code {code}): perhaps the server does not know this key yet")
        time.sleep(2.0)


def _address(server: str) -> tuple[str, int]:
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f'server "{server}": write it as host:port, as in 192.0.2.7:8000')
    return host, int(port)


def _follow(run: str, out: Path, env: Mapping[str, str], log: Path, listen: Listener) -> None:
    """Pass events on until the run is over. Raises TrainingError where it failed."""
    heard, looked = 0, time.monotonic()
    while True:
        events = _events(out)
        for event in events[heard:]:
            listen(event)
        heard = len(events)
        if (out / "summary.json").exists():
            return
        if time.monotonic() - looked > STATUS:
            looked = time.monotonic()
            status = _status(run, env)
            if status.startswith("finished") and not (out / "summary.json").exists():
                raise TrainingError(f"the run {status}: {_reason(events, run, env, log)}")
        time.sleep(POLL)


def _events(out: Path) -> list[dict[str, Any]]:
    try:
        lines = (out / "events.jsonl").read_text(encoding="utf-8").split("\n")
    except OSError:
        return []
    return [json.loads(line) for line in lines[:-1]]


def _status(run: str, env: Mapping[str, str]) -> str:
    listed = asked([command("flwr"), "ls", NAME, "--run-id", run, "--format", "json"], env)
    return str(listed["runs"][0]["status"])


def _reason(events: list[dict[str, Any]], run: str, env: Mapping[str, str], log: Path) -> str:
    """What the run said when it failed: by its events, or else in what Flower kept of its words."""
    if events and events[-1]["event"] == "failed":
        return str(events[-1]["error"])
    arguments = [command("flwr"), "log", run, NAME, "--show"]
    done = subprocess.run(arguments, env=dict(env), capture_output=True, text=True, check=False)
    said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    ours = [line for line in said if line.startswith("fedshift.errors.")]
    if ours:
        return ours[-1].partition(": ")[2]
    return " ".join([*said[-3:], f"(see {log})"])
