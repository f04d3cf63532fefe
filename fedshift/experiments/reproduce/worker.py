"""One run of a table, here or in a process of its own."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from fedshift.errors import FedshiftError
from fedshift.experiments.folder import EventLog, kept_in, record
from fedshift.experiments.reproduce.store import Run, Store
from fedshift.experiments.resume import check_links
from fedshift.experiments.task import prepare
from fedshift.experiments.training import Listener


def perform(run: Run, store: Store, tell: Listener) -> None:
    """Train the run, from its last checkpoint if it has one, and write its folder.

    `tell` hears of each event. Whatever fails is raised.
    """
    folder = store.clear(run)
    check_links(folder)
    try:
        prepared = prepare(run.config)
        record(folder, run.config, prepared, tell, keeper=kept_in(folder, run.config, prepared))
    except Exception as e:
        EventLog(folder)({"event": "failed", "error": reason(e)})
        raise


def reason(error: Exception) -> str:
    """A failure in one line: the library's own messages as they are, others with their type."""
    said = " ".join(str(error).split())
    return said if isinstance(error, FedshiftError) else f"{type(error).__name__}: {said}"


def work(run: Run, store: Store, channel: Connection) -> None:
    """Entry point of a process: events go through the channel, the last is "over"."""

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            channel.send({"event": "round", "round": event["round"]})

    try:
        perform(run, store, tell)
    except Exception as e:
        channel.send({"event": "over", "error": reason(e)})
    else:
        channel.send({"event": "over", "error": None})
