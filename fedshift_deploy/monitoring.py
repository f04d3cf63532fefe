"""Serve /healthz, /readyz and /metrics of a process, for supervisors and Prometheus; read-only."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedshift.errors import FedshiftError, InputError
from fedshift_deploy.federation import NAME, Link, Listener
from fedshift_deploy.joining import NOT_JOINED, Unready
from fedshift_deploy.keys import certificate_end
from fedshift_deploy.place import clients_of
from fedshift_deploy.processes import run_flower
from fedshift_deploy.reaching import address_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# Returns why something is not as it should be; "" if all is well.
Check = Callable[[], str]
# Seconds between two queries for connected clients (each starts a process of Flower's), and without
# an answer until the server counts as unhealthy.
EVERY, SILENT = 15.0, 90.0
# Most connections at a time: more than supervisors need, but a limit for anyone else.
AT_ONCE = 32
# Why a server is not ready before there is a SuperLink.
STARTING = "starting"
INSTALL = "pip install 'fedshift[ops]'"


class Monitor(NamedTuple):
    """`listen` counts a run's events; `beside` is a context that tracks a SuperLink's clients."""

    listen: Listener
    beside: Callable[[Link], contextlib.AbstractContextManager[object]]


@dataclass
class Presence:
    """Tracks which clients are connected, by asking again and again during the run.

    ask       returns the names of the connected clients
    hear      called with each answer
    required  how many must be connected for the server to be ready
    """

    clients: tuple[str, ...]
    ask: Callable[[], frozenset[str]]
    hear: Callable[[frozenset[str]], None]
    required: int
    connected: frozenset[str] = frozenset()
    answered: float = field(default_factory=time.monotonic)

    def healthy(self) -> str:
        """Why the server is unhealthy: Flower has not answered for a long time; "" if it is not."""
        silent = time.monotonic() - self.answered
        return "" if silent < SILENT else f"the SuperLink has not answered for {silent:.0f} s"

    def ready(self) -> str:
        """Why no round can be played now; "" if one can."""
        missing = [name for name in self.clients if name not in self.connected]
        present = len(self.clients) - len(missing)
        if why := self.healthy():
            return why
        if present < self.required:
            of = f"{present} of {len(self.clients)} clients are connected"
            return f"{of}, and {self.required} are needed; missing: {', '.join(missing)}"
        return ""

    def look(self) -> None:
        """Ask once, and ignore errors: a busy SuperLink is asked again later."""
        with contextlib.suppress(FedshiftError, LookupError):
            self.connected, self.answered = self.ask(), time.monotonic()
            self.hear(self.connected)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ask every `EVERY` seconds while the block runs."""
        over = threading.Event()

        def watch() -> None:
            self.look()
            while not over.wait(EVERY):
                self.look()

        # A daemon thread, so that a query that is under way does not delay the end.
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            over.set()


def connected(link: Link) -> frozenset[str]:
    """The folder names of the clients that Flower lists as connected. Raises InputError."""
    listed = run_flower(["supernode", "list", NAME, "--format", "json"], link.env)
    online = [node["node-id"] for node in listed["nodes"] if node["status"] == "online"]
    return frozenset(link.names[node] for node in online if node in link.names)


def open_port(address: str) -> socket.socket:
    """A listening socket for "HOST:PORT", or for "PORT" on loopback.

    Raises InputError if it cannot be opened, or prometheus_client is not installed.
    """
    if find_spec("prometheus_client") is None:
        raise InputError(f"--metrics needs prometheus_client, which is not installed: {INSTALL}")
    # Loopback by default, because reading needs neither a key nor TLS.
    given = f"127.0.0.1:{address}" if address.isdecimal() else address
    host, port = address_of(given, "--metrics")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as e:
        raise InputError(
            f"--metrics {given} cannot be opened: {e.strerror}; give another"
        ) from None


@contextlib.contextmanager
def monitored(
    address: str | None, folder: Path, tell: Listener, required: int | None = None
) -> Iterator[Monitor]:
    """Serve a server's metrics and checks; yields a `Monitor` that passes events on to `tell`.

    It serves from the beginning until the SuperLink ends: a server that is starting is healthy, but
    not ready.

    address   as in `open_port`; None serves and counts nothing
    required  how many clients must be connected for the server to be ready; all by default

    Raises InputError as `open_port`, and for a folder without the server's files.
    """
    if address is None:
        yield Monitor(tell, contextlib.nullcontext)
        return
    with open_port(address) as port, contextlib.ExitStack() as serving:
        # Imported here, because the command line must work without prometheus_client.
        from fedshift_deploy.metrics import ServerMetrics

        clients = tuple(place.name for place in clients_of(folder))
        metrics = ServerMetrics(clients, certificate_end(folder / "server.crt"))
        up = list[Presence]()
        checks: dict[str, Check] = {
            "/healthz": lambda: up[-1].healthy() if up else "",
            "/readyz": lambda: up[-1].ready() if up else STARTING,
        }
        serving.enter_context(answering(port, checks, metrics.registry))

        @contextlib.contextmanager
        def beside(link: Link) -> Iterator[None]:
            presence = Presence(
                clients, lambda: connected(link), metrics.connect, required or len(clients)
            )
            up.append(presence)
            # `serving` ends here, too: while the SuperLink shuts down there are no answers.
            with presence.watched(), serving:
                yield

        def listen(event: dict[str, Any]) -> None:
            metrics(event)
            tell(event)

        yield Monitor(listen, beside)


@contextlib.contextmanager
def client_monitored(address: str | None, place: Path) -> Iterator[Callable[[Unready], None]]:
    """Serve whether a client can take part; yields the `watch` for `join`.

    A client that waits for its server is healthy, but not ready. Raises InputError as `open_port`.
    """
    latest: list[Unready] = [lambda: NOT_JOINED]
    if address is None:
        yield latest.append
        return
    with open_port(address) as port:
        from fedshift_deploy.metrics import client_metrics

        registry = client_metrics(lambda: not latest[-1](), certificate_end(place / "ca.crt"))
        checks: dict[str, Check] = {"/healthz": lambda: "", "/readyz": lambda: latest[-1]()}
        with answering(port, checks, registry):
            yield latest.append


@contextlib.contextmanager
def answering(
    port: socket.socket, checks: Mapping[str, Check], registry: CollectorRegistry
) -> Iterator[None]:
    """Serve checks, by path, and /metrics on this socket, in a thread, while the block runs.

    A check that returns "" is answered with 200, any other with 503 and the reason.
    """
    import uvicorn
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    def of(check: Check) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            why = check()
            return PlainTextResponse(f"{why or 'ok'}\n", 503 if why else 200)

        return answer

    def numbers(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    paths = {path: of(check) for path, check in checks.items()} | {"/metrics": numbers}
    config = uvicorn.Config(
        Starlette(routes=[Route(path, answer) for path, answer in paths.items()]),
        # Otherwise uvicorn would log invalid requests of others among the command's own lines.
        log_config=None, log_level="critical",
        access_log=False, lifespan="off", ws="none", limit_concurrency=AT_ONCE,
        timeout_keep_alive=5, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [port]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(5.0)
