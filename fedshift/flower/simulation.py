"""Flower's simulation (Ray) as a context manager that gives its grid to the calling thread.

Flower's own entry point blocks the main thread and passes the grid to another one. Here it is the
other way round, so that Ctrl-C ends the round at once and no process of Ray is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedshift.errors import FedshiftError, InputError
from fedshift.flower.installed import check_flower

# Seconds between two looks for replies, and seconds that the simulation may take to start.
POLL = 0.02
START = 300.0


@dataclass(eq=False)
class _Runtime:
    """State shared by the simulation's threads and the calling thread."""

    ready: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    grid: Grid | None = None
    failure: BaseException | None = None


@contextlib.contextmanager
def simulation(app: ClientApp, clients: int, *, actors: int | None = None) -> Iterator[Grid]:
    """Run Flower's simulation with `clients` nodes for the time of the block.

    actors: number of processes in which clients run, each with one CPU; by default as many as there
    are CPUs. With RAY_ADDRESS set, the cluster there decides. Raises InputError if Flower or Ray is
    missing, and FedshiftError if the simulation fails.
    """
    check_flower(simulation=True)
    if actors is not None and actors < 1:
        raise InputError(f"{actors} actors; give 1 or more")
    runtime = _Runtime()
    # A daemon, so that a simulation that hangs does not keep this process from ending.
    thread = threading.Thread(
        target=_run, args=(runtime, app, clients, actors), name="flower-simulation", daemon=True
    )
    with _silence_flower():
        thread.start()
        try:
            yield _wait_until_ready(runtime)
        finally:
            runtime.over.set()
            # Ray may need some seconds to end its actors; after that, force it to.
            thread.join(60.0)
            _shut_down()


def _run(runtime: _Runtime, app: ClientApp, clients: int, actors: int | None) -> None:
    """Run the simulation until `runtime.over` is set; in a thread of its own."""
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        # Hand the grid to the calling thread, and keep the simulation alive until it is done.
        runtime.grid = grid
        runtime.ready.set()
        runtime.over.wait()

    init: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # A cluster has its own number of CPUs, and Ray refuses another one.
    if "RAY_ADDRESS" not in os.environ:
        init |= {"num_cpus": actors or os.cpu_count() or 1}
    resources = {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    try:
        run_simulation(server, app, clients, backend_config=resources)
    # Pass any error to the calling thread, which would otherwise wait for ever.
    except BaseException as e:
        runtime.failure = e
    finally:
        # Wake the calling thread if it still waits for the start.
        runtime.ready.set()
        runtime.over.set()


def _wait_until_ready(runtime: _Runtime) -> Grid:
    """The simulation's grid when it is up. Raises FedshiftError if it fails to start."""
    if not runtime.ready.wait(START) or runtime.grid is None:
        why = runtime.failure or f"it did not start within {START:g} s"
        raise FedshiftError(f"Flower's simulation failed: {_root(why)}")
    return _watched(runtime.grid, runtime)


def _root(error: BaseException | str) -> str:
    """The text of the original error, which Flower wraps in errors without a reason."""
    while isinstance(error, BaseException) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def _silence_flower() -> Iterator[None]:
    """Silence Flower's log for a block; our strategy reports what happens to clients."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _restore_sigterm() -> None:
    """Restore the handler of SIGTERM; Ray's prints the stack and aborts after three seconds.

    Ray has installed its own below Python, so setting Python's handler again replaces it.
    """
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _shut_down() -> None:
    """End what is left of Ray if the simulation did not end normally."""
    with contextlib.suppress(ImportError):
        import ray

        ray.shutdown()


def _watched(grid: Grid, runtime: _Runtime) -> Grid:
    """The simulation's grid, changed to raise an error once the simulation has ended."""
    nodes = grid.get_node_ids

    def check() -> None:
        _restore_sigterm()
        if runtime.over.is_set():
            why = runtime.failure or "it ended before the run did"
            raise FedshiftError(f"Flower's simulation failed: {_root(why)}")

    def connected() -> Iterable[int]:
        check()
        return nodes()

    def send_and_receive(
        messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        # Not Flower's own method, which would go on waiting after the simulation has failed.
        waiting = set(grid.push_messages(messages))
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        received: list[Message] = []
        while waiting and time.monotonic() < end:
            check()
            replies = list(grid.pull_messages(waiting))
            received += replies
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            if waiting:
                time.sleep(POLL)
        return received

    # On this grid object only.
    grid.get_node_ids = connected  # type: ignore[method-assign]
    grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
    return grid
