"""Events that name the clients whose answers the server is waiting for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from fedshift.flower.nodes import named, names_of
from fedshift.flower.records import fields_of
from fedshift.flower.waiting import LONG, Tell, waiting_event
from fedshift_deploy.sites.answering import ASK

# What a client with data of its own has done when it has answered a question (`STEPS`).
SENT = {
    "survey": "have sent label counts and columns' ranges",
    "totals": "have sent columns' sums or texts",
    "squares": "have sent columns' sums of squares, to standardise them",
    "prepare": "have encoded their rows",
    "scores": "have scored the model",
}


class Awaited:
    """Watches a grid's messages, and every `LONG` seconds names clients whose answers are missing.

    It reports on registration, scores and a router's fits; rounds have events of their own.
    called: clients' names by the names of their nodes.
    """

    def __init__(self, grid: Grid, tell: Tell, called: Mapping[str, str]) -> None:
        self.grid, self.tell, self.called = grid, tell, called
        self.kind, self.what, self.messages, self.due = "", "", 0, 0.0
        self.asked, self.missing = set[int](), set[int]()
        self.last: object = None
        self._send, self._pull = grid.send_and_receive, grid.pull_messages
        # Replaced on this object only, not on its class. The grid's own `send_and_receive` calls
        # `self.pull_messages`, and so reaches `pull` below.
        grid.send_and_receive = self.send  # type: ignore[method-assign]
        grid.pull_messages = self.pull  # type: ignore[method-assign]

    def send(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As the grid's method; notes which clients are asked, and for what."""
        sent = list(messages)
        kind = sent[0].metadata.message_type if sent else ""
        if kind != self.kind:
            self.kind, self.messages, self.due = kind, 0, time.monotonic() + LONG
        self.messages += 1
        self.what = _what(sent[0], self.messages) if sent else ""
        self.asked = {message.metadata.dst_node_id for message in sent}
        self.missing = set(self.asked)
        return self._send(sent, timeout=timeout)

    def pull(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the grid's method, which is called again and again until all answers are there."""
        messages = list(self._pull(message_ids))
        self.missing -= {message.metadata.src_node_id for message in messages}
        now, state = time.monotonic(), (self.what, len(self.missing))
        if self.what and now >= self.due and state != self.last:
            self.due, self.last = now + LONG, state
            names = names_of(self.grid)
            missing = [self._name(node, names) for node in sorted(self.missing)]
            done, of = len(self.asked) - len(missing), len(self.asked)
            self.tell(waiting_event(self.what, done, of, sorted(missing)))
        return messages

    def _name(self, node: int, names: Mapping[int, str]) -> str:
        name = names.get(node, "")
        return self.called.get(name, name) or named(node, names)


def _what(message: Message, number: int) -> str:
    """What a client has done once it answers this message; "" for messages without such events."""
    kind, content = message.metadata.message_type, message.content
    if kind == "evaluate":
        return f"have scored round {int(fields_of(content, 'run')['round'])}"
    if kind == f"query.{ASK}":
        step = str(fields_of(content, ASK)["step"])
        return SENT[step]
    about = {
        "query.register": "have registered",
        "query.calibrate": f"have answered message {number} of the calibration",
        "query.router": f"have answered message {number} of the router's fits",
    }
    return about.get(kind, "")
