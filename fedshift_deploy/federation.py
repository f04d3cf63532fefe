"""Serve a federation with Flower's SuperLink and `flwr`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedshift.errors import DataError, FedshiftError, InputError, NetworkError, TrainingError
from fedshift.files import append
from fedshift.flower.quiet import quiet_environment
from fedshift.record.drops import news_text
from fedshift.record.folder import CHECKPOINTS, EVENTS, SERVING, SUMMARY
from fedshift.record.in_use import alone_in
from fedshift_deploy.inside import inside, private_socket
from fedshift_deploy.place import check_place_unshared, clients_of
from fedshift_deploy.processes import check_port, run_flower, running, wait_for
from fedshift_deploy.reaching import answers
from fedshift_deploy.watching import SERVERAPP, Ended, Watch, ending, nothing

# Seconds between two looks for events; seconds without any, after which Flower is asked.
POLL, STATUS = 0.5, 15.0
# Give up after Flower has failed this many times in a row to report a run's status.
SILENCES = 4
NAME = "federation"
RAISED = "fedshift.errors."
KINDS = {
    kind.exit_code: kind
    for kind in (FedshiftError, InputError, DataError, TrainingError, NetworkError)
}
# Turn off Flower's gRPC ports, which no guard protects.
CLOSED = {"FLWR_INTERNAL_GRPC_CONTROL_API": "0", "FLWR_INTERNAL_GRPC_FLEET_API": "0"}
Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Link:
    """A SuperLink that is up, knows the clients' keys, and waits for runs.

    ended  returns which of the server's processes have ended since the last call
    begin  call it before a run is submitted
    """

    folder: Path
    env: Mapping[str, str]
    log: Path
    ended: Callable[[], Ended] = nothing
    begin: Callable[[], None] = lambda: None
    # The clients' folder names by Flower's ids of their nodes.
    names: Mapping[str, str] = field(default_factory=dict)


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: quiet, and without its gRPC ports.

    Raises InputError if `home`, the folder for Flower's own files, cannot be made.
    """
    try:
        # Private, because Flower unpacks apps there that are run later.
        home.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        raise InputError(f"{home}: cannot be made: {e.strerror}; Flower writes there") from None
    return {**os.environ, **quiet_environment(home), **CLOSED}


@contextlib.contextmanager
def superlink(folder: Path, *, host: str, port: int) -> Iterator[Link]:
    """Run a SuperLink with TLS that knows only the keys of the federation's clients.

    Only this user may start runs or register keys; others can only be SuperNodes (`guard`). The
    SuperLink ends with the block. Raises InputError for certificates, keys and ports that cannot be
    used, if server.crt is not for `host`, if the folder has a server already, or if other users may
    write there.
    """
    # Absolute, because Flower's processes may have another current folder.
    places, folder = clients_of(folder), folder.absolute()
    check_place_unshared(folder)
    # Lock the folder: a second server would overwrite the address that the first one's commands
    # read.
    with alone_in(folder):
        check_port(host, port)
        with _start_superlink(folder, host, port) as link:
            # In parallel, because each registration starts a Python process: for a hundred clients
            # that takes minutes.
            with ThreadPoolExecutor(4) as pool:
                nodes = list(pool.map(lambda place: _register(place, link.env), places))
            names = dict(zip(nodes, (place.name for place in places), strict=True))
            yield replace(link, names=names)


@contextlib.contextmanager
def _start_superlink(folder: Path, host: str, port: int) -> Iterator[Link]:
    """Run a SuperLink, and wait until it answers. It knows no keys yet."""
    # Flower's commands on this machine need an address to connect to, not one to listen on.
    address = "127.0.0.1" if host in ("0.0.0.0", "") else host
    words = ["fedshift", "deploy", "server", str(folder), "--host", host, "--port", str(port)]
    env = environment(folder / "flower") | {SERVING: shlex.join(words)}
    server = f'address = "{address}:{port}"\nroot-certificates = "{folder / "ca.crt"}"\n'
    config = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n{server}'
    (folder / "flower" / "config.toml").write_text(config, encoding="utf-8")
    log = folder / "superlink.log"
    arguments = [
        sys.executable, "-P", "-m", "fedshift_deploy.guard", str(folder), f"{address}:{port}",
        "--isolation", "process", "--host", host, "--port", str(port), "--enable-supernode-auth",
        "--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt"),
        "--ssl-keyfile", str(folder / "server.key"),
    ]  # fmt: skip
    seen: dict[int, str] = {}
    with private_socket() as place, running(arguments, env := env | place, log, seen) as process:
        # Keys can be registered only when the SuperLink listens.
        wait_for(address, port, process, log)
        if why := answers(f"{address}:{port}", folder / "ca.crt"):
            raise FedshiftError(f"{why}; see {log}")
        watch = Watch(process, seen)
        yield Link(folder, env, log, watch, watch.begin)


def submit(link: Link, out: Path, listen: Listener, **config: str | float) -> None:
    """Run the federation's app once, with these values of its configuration, and wait for its end.

    An unfinished run in `out` is resumed. New events of the run are passed to `listen`. Raises the
    error of the run: in its own class if that is one of ours, else as TrainingError.
    """
    # JSON strings and numbers are valid TOML.
    lines = "".join(f"{k} = {json.dumps(v)}\n" for k, v in config.items())
    settings = link.folder / "flower" / "run.toml"
    settings.write_text(f"out = {json.dumps(str(out.absolute()))}\n{lines}", encoding="utf-8")
    start = ["run", str(link.folder / "app"), NAME, "--run-config", str(settings)]
    # Skip the events of an interrupted run, which were shown then.
    seen = len(_events(out))
    link.begin()
    run = str(run_flower([*start, "--format", "json"], link.env)["run-id"])
    follow(run, out, link, listen, seen)


def serve(
    folder: Path,
    out: Path,
    *,
    host: str,
    port: int,
    listen: Listener,
    patience: float,
    timeout: float,
    min_clients: int | None = None,
    refit: bool = False,
    experiment: str = "",
    beside: Callable[[Link], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Run the experiment of a federation's folder once all its clients have joined.

    out          the run's folder; an unfinished run there is resumed
    patience     seconds to wait for all clients; after that, `min_clients` are enough
    timeout      seconds that a client has for a round
    refit        also fit a router by gradients
    experiment   its TOML; the app's if left out
    beside       a context to be in while the SuperLink is up

    All processes are ended again, also after a failure.
    """
    clients, given = len(clients_of(folder)), dict[str, str | float]()
    given |= {"refit": True} if refit else {}
    if min_clients is not None:
        if min_clients > clients:
            raise InputError(f"--min-clients {min_clients}: the federation has {clients} clients")
        given["min_clients"] = min_clients
    given |= {"experiment": experiment} if experiment else {}
    with superlink(folder, host=host, port=port) as link, beside(link):
        submit(link, out, listen, patience=patience, timeout=timeout, **given)


def _register(place: Path, env: Mapping[str, str]) -> str:
    """Register a client's key; return Flower's id of its node."""
    arguments = ["supernode", "register", str(place / "key.pub"), NAME]
    return str(run_flower([*arguments, "--name", place.name, "--format", "json"], env)["node-id"])


def follow(run: str, out: Path, link: Link, listen: Listener, seen: int = 0) -> None:
    """Pass on events after the first `seen` until the run ends. Raises the error of the run."""
    passed_on, checked, silences = seen, time.monotonic(), 0
    while True:
        # Ask this before reading events: then the events of a process that has ended are complete.
        ended = link.ended()
        events = _events(out)
        for event in events[passed_on:]:
            # A failure is not passed on as an event: it is raised below.
            if event["event"] != "failed":
                listen(event)
            # Write news to the log here, because Flower does not pass on what its ServerApp logs.
            if line := news_text(event):
                when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event["time"]))
                level = "INFO" if event["event"] in ("waiting", "joined") else "WARN"
                append(link.log, f"{when} {level} [fedshift] {line}")
        if len(events) > passed_on:
            # A run that writes events goes on: each question to Flower starts a process.
            passed_on, checked, silences = len(events), time.monotonic(), 0
        # The summary is written last, so if it exists the run is complete.
        if (out / SUMMARY).exists():
            return
        if len(events) > seen and events[-1]["event"] == "failed":
            kind = KINDS.get(events[-1].get("exit_code", 0), TrainingError)
            raise kind(str(events[-1]["error"]))
        if ended and (error := _error_of_loss(ended, run, out, link)):
            raise error
        if time.monotonic() - checked > STATUS:
            status, why = _status(run, link.env)
            checked, silences = time.monotonic(), 0 if status else silences + 1
            # Once may be a busy machine; after several times we might miss the end of the run.
            if silences == SILENCES:
                raise FedshiftError(f"Flower does not say how the run is: {why} (see {link.log})")
            # The run may have written more events, or ended well, since they were read above.
            goes_on = bool(_events(out)[passed_on:]) or (out / SUMMARY).exists()
            if status.startswith("finished") and not goes_on:
                raise failure_of(status, run, link)
        time.sleep(POLL)


def _events(out: Path) -> list[dict[str, Any]]:
    try:
        lines = (out / EVENTS).read_text(encoding="utf-8").split("\n")
    except OSError:
        return []
    # The last line may be incomplete: it is read when it has its line break.
    return [event for line in lines[:-1] if (event := _event(line))]


def _event(line: str) -> dict[str, Any] | None:
    """One event; None for an incomplete line, such as a full disk causes."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _status(run: str, env: Mapping[str, str]) -> tuple[str, str]:
    """(status, "") or ("", reason). It never raises: a busy machine must not end a run."""
    try:
        listed = run_flower(["ls", NAME, "--run-id", run, "--format", "json"], env)
        return str(listed["runs"][0]["status"]), ""
    except (FedshiftError, LookupError) as e:
        return "", str(e)


def _error_of_loss(ended: Ended, run: str, out: Path, link: Link) -> FedshiftError | None:
    """The error of a run during which one of the server's processes ended."""
    if list(ended) == [SERVERAPP]:
        status, _ = _status(run, link.env)
        # A ServerApp also ends if it fails before there is a run folder; Flower knows the reason.
        if status.startswith("finished"):
            return failure_of(status, run, link)
    process, code = next(iter(ended.items()))
    return ending(process, code, out, link.log, begun=(out / CHECKPOINTS).is_dir())


def failure_of(status: str, run: str, link: Link) -> FedshiftError:
    """The error of a run without one in its events, taken from Flower's log of the run."""
    arguments = [*inside("flwr"), "log", run, NAME, "--show"]
    done = subprocess.run(
        arguments, env=dict(link.env), capture_output=True, text=True, check=False
    )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    # Flower's log has the traceback as text, whose last line names the class.
    errors = [line.removeprefix(RAISED) for line in lines if line.startswith(RAISED)]
    if errors:
        name, _, text = errors[-1].partition(": ")
        kinds = {kind.__name__: kind for kind in KINDS.values()}
        return kinds.get(name, TrainingError)(text)
    return TrainingError(f"the run {status}: {' '.join(lines[-3:])} (see {link.log})")
