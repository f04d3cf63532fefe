"""A federation's metrics for Prometheus, from the events of its run and the connected clients.

Labels are only clients' folder names and kinds of drop-outs. Any program that reaches the port can
read them, so they contain no client's sizes, label counts, weights or scores, nor its error texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)  # fmt: skip

from fedshift.record import drops

# Otherwise each counter has a second series with the time when it was created.
disable_created_metrics()  # type: ignore[no-untyped-call]
# Labels for kinds of drop-outs; "other" if an event names none.
KINDS = (*drops.KINDS, "other")
SECONDS = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
# Name: (description, keys of events; the first one that is present counts).
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "train_loss": ("The clients' mean training loss in the last round.", ("train_loss",)),
    "ess_examples": ("Effective sample size of the last round's weights.", ("ess",)),
    "ess_fraction": ("The same as a share of the examples.", ("ess_fraction",)),
    "gap": ("Distance of the labels that the last round trained on to the target's.", ("gap",)),
    "accuracy_ratio": (
        "Accuracy at the target, 0 to 1, in the last evaluation.",
        ("system_accuracy", "target_accuracy"),
    ),
}


class ServerMetrics:
    """A server's metrics: call it with each event of the run, and `connect` with who is connected.

    clients  the names of their folders
    expires  when the server's certificate ends, in seconds since 1970
    """

    def __init__(self, clients: Sequence[str], expires: float) -> None:
        self.registry, self.clients = CollectorRegistry(), clients
        self._rounds = self._gauge("rounds_planned", "How many rounds the run has.")
        self._round = self._gauge("round", "The last round that is over.")
        self._ended = self._gauge("round_end_timestamp_seconds", "When that was.")
        self._seconds = Histogram(
            "fedshift_round_seconds", "What a round took.", buckets=SECONDS, registry=self.registry
        )
        self._skipped = self._counter("rounds_skipped", "Rounds that changed nothing.")
        self._dropped = self._counter(
            "dropouts", "Clients that were missing in a round.", "client", "kind"
        )
        self._unscored = self._counter(
            "missing_scores", "Clients that gave no scores of a round's model.", "client", "kind"
        )
        self._bytes = self._counter("message_bytes", "Bytes of rounds' tensors.", "direction")
        self._last = {name: self._gauge(name, GAUGES[name][0]) for name in GAUGES}
        # NaN, not 0, as long as there is no value.
        for gauge in (self._round, self._rounds, self._ended, *self._last.values()):
            gauge.set(math.nan)
        self._connected = self._gauge("client_connected", "1 if it is connected.", "client")
        self._gauge("clients_expected", "Clients of the federation.").set(len(clients))
        self._gauge("certificate_end_timestamp_seconds", "End of server.crt.").set(expires)
        # Create all series now: Prometheus sees no increase in a series that begins at 1.
        for client in clients:
            self._connected.labels(client)
            for kind in KINDS:
                self._dropped.labels(client, kind)
                self._unscored.labels(client, kind)
        for direction in ("sent", "received"):
            self._bytes.labels(direction)
        self._counted = set[tuple[int, int]]()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Count one event of the run."""
        kind = event["event"]
        if kind == "start":
            self._rounds.set(event["rounds"])
            self._round.set(event.get("after", 0))
        elif kind == "dropped":
            self._drop(event["round"], event)
        elif kind == "unscored":
            self._unscored.labels(*_labels(event)).inc()
        elif kind in ("round", "evaluation"):
            for name, (_, keys) in GAUGES.items():
                if value := [event[key] for key in keys if key in event]:
                    self._last[name].set(_number(value[0]))
        if kind == "round":
            self._count(event)

    def connect(self, clients: Collection[str]) -> None:
        """These clients are connected now, and the others are not."""
        for client in self.clients:
            self._connected.labels(client).set(client in clients)

    def _count(self, event: Mapping[str, Any]) -> None:
        """Count a round that is complete."""
        self._round.set(event["round"])
        self._ended.set(event["time"])
        self._seconds.observe(event["seconds"])
        self._skipped.inc("skipped" in event)
        self._bytes.labels("sent").inc(event.get("bytes_down", 0))
        self._bytes.labels("received").inc(event.get("bytes_up", 0))
        for lost in event.get("dropped", ()):
            self._drop(event["round"], lost)

    def _drop(self, t: int, lost: Mapping[str, Any]) -> None:
        # The event at the end of a round repeats drop-outs that were reported during the round.
        if (t, lost["client"]) not in self._counted:
            self._counted.add((t, lost["client"]))
            self._dropped.labels(*_labels(lost)).inc()

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"fedshift_{name}", what, labels, registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"fedshift_{name}", what, labels, registry=self.registry)


def _labels(lost: Mapping[str, Any]) -> tuple[str, str]:
    """(client's name, kind of drop-out)."""
    return f"client-{lost['client']}", lost["kind"] if lost.get("kind") in KINDS else "other"


def client_metrics(joined: Callable[[], bool], expires: float) -> CollectorRegistry:
    """A client's metrics: whether it can take part, and when its copy of ca.crt ends."""
    registry = CollectorRegistry()
    what = "1 if the client has joined, and its server answers."
    Gauge("fedshift_joined", what, registry=registry).set_function(joined)
    end = Gauge("fedshift_certificate_end_timestamp_seconds", "End of ca.crt.", registry=registry)
    end.set(expires)
    return registry


def _number(value: Any) -> float:
    """A number of an event, where infinity is text, and a missing number is null."""
    return math.nan if value is None else float(value)
