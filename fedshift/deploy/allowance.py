"""How many bytes clients may answer: bounded by what the server asked with, before they are kept.

A SuperLink keeps a client's answer, piece by piece, until the server's app loads it whole. What the
app sends with a question holds the model, so the answer of a client is as large as that, or a few
times (`training.max_reply`). The guard sees both go by.
"""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

LOG = logging.getLogger("fedshift.deploy")
# The server's app, over its socket: a new question, and a piece of what it sends with one.
QUESTION, PIECE = "/v1/runtime/push-messages", "/v1/runtime/push-object"
# Clients: the form of an answer, and its pieces.
ANSWERS = ("/v1/fleet/push-messages", "/v1/fleet/push-object")
# What any answer may have, a registration as well. Times the model unless the experiment says.
LEAST, TIMES = 2**23, 8.0


def times_of(file: Path) -> float:
    """training.max_reply of a federation's experiment; the default in folders without one."""
    try:
        training = tomllib.loads(file.read_text(encoding="utf-8")).get("training", {})
        return float(training.get("max_reply", TIMES))
    except (OSError, ValueError):
        return TIMES


class Allowance:
    """What each client has sent since the server's latest question.

    times: how often the largest question's bytes an answer may have; 8 MiB in any case.
    """

    def __init__(self, times: float = TIMES) -> None:
        self._times, self._question, self._largest = times, 0, 0
        self._sent: dict[str, int] = {}

    def ask(self) -> None:
        """The server begins a new question; only it can do so."""
        self._question = 0
        self._sent.clear()

    def send(self, size: int) -> None:
        """A piece of the question goes to the clients.

        What clients are sent in one batch is added up where it differs: pieces name no client.
        Clients with models of their own may answer so many times more.
        """
        self._question += size
        # The largest: pieces that the SuperLink has already are not sent again.
        self._largest = max(self._largest, self._question)

    @property
    def most(self) -> int:
        """Bytes that one client may answer."""
        return max(LEAST, int(self._times * self._largest))

    def take(self, who: str, size: int) -> bool:
        """Whether a client may send so much more; if so, it counts."""
        sent = self._sent.get(who, 0) + size
        if sent > self.most:
            LOG.warning("%s: its answer has more than %d bytes, refused", who, self.most)
            return False
        self._sent[who] = sent
        return True
