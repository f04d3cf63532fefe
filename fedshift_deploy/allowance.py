"""Limit how many bytes a client may send as an answer, before the SuperLink stores them.

A SuperLink stores a client's answer piece by piece until the server's app loads all of it. The
app's question contains the model, so an answer should be about as large, or a few times as large
(`training.max_reply`). The guard sees both pass, and can compare.
"""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

LOG = logging.getLogger("fedshift.deploy")
# Requests of the server's app, over its socket: a new question, and a piece of its contents.
QUESTION, PIECE = "/v1/runtime/push-messages", "/v1/runtime/push-object"
# Requests of clients: the outline of an answer, and its pieces.
ANSWERS = ("/v1/fleet/push-messages", "/v1/fleet/push-object")
# Bytes that any answer may have, such as a registration; and the default of max_reply.
LEAST, TIMES = 2**23, 8.0


def times_of(file: Path) -> float:
    """training.max_reply of the experiment in this file; the default if there is none."""
    try:
        training = tomllib.loads(file.read_text(encoding="utf-8")).get("training", {})
        return float(training.get("max_reply", TIMES))
    except (OSError, ValueError):
        return TIMES


class Allowance:
    """Counts what each client has sent since the server's latest question.

    times: an answer may have so many times the bytes of the largest question, and always 8 MiB.
    """

    def __init__(self, times: float = TIMES) -> None:
        self._times, self._question, self._largest = times, 0, 0
        self._sent: dict[str, int] = {}

    def ask(self) -> None:
        """Start counting anew: the server begins a new question. (Clients cannot cause this.)"""
        self._question = 0
        self._sent.clear()

    def send(self, size: int) -> None:
        """Count a piece of the question that goes to the clients.

        Pieces do not name a client. So if clients receive different contents, all of these are
        added up, and the limit is too generous by that factor.
        """
        self._question += size
        # Use the largest question so far: pieces that the SuperLink has already are not sent again.
        self._largest = max(self._largest, self._question)

    @property
    def most(self) -> int:
        """How many bytes the answer of one client may have."""
        return max(LEAST, int(self._times * self._largest))

    def take(self, who: str, size: int) -> bool:
        """Whether a client may send `size` more bytes; if so, count them."""
        sent = self._sent.get(who, 0) + size
        if sent > self.most:
            LOG.warning("%s: its answer has more than %d bytes, refused", who, self.most)
            return False
        self._sent[who] = sent
        return True
