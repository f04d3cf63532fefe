"""What a client's app has to say to the client's operator, who sees `fedshift deploy client`.

The app runs in a process of its own for each message, and writes into Flower's log. So it leaves
lines of JSON in a file that `deploy client` names, reads and removes.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from fedshift.errors import FedshiftError

# The variable by which `fedshift deploy client` passes the file's path.
NOTICES = "FEDSHIFT_NOTICES"


def notify(**fields: Any) -> None:
    """Leave one notice; nothing where no client's process reads it.

    round, rounds: what the client has answered, of how many. trouble: why it cannot answer.
    """
    if path := os.environ.get(NOTICES):
        # An answer to the server is worth more than a line on the screen.
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(fields) + "\n")


def read_notice(line: str) -> dict[str, Any]:
    """One notice; empty where the line is none."""
    try:
        notice = json.loads(line)
    except ValueError:
        return {}
    return notice if isinstance(notice, dict) else {}


def words_for_here(error: FedshiftError) -> str:
    """What the client's own operator may read: all, where the server reads less."""
    return str(getattr(error, "detail", error))
