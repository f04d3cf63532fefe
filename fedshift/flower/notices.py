"""Notices from a client's app to the client's operator, who watches `fedshift deploy client`.

The app runs in a process of its own for each message, and its output goes to Flower's log. So it
appends lines of JSON to a file, which `deploy client` names, reads and removes.
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
    """Append one notice, if a `deploy client` process reads them.

    round, rounds: the round that the client has answered, and of how many. trouble: why it cannot
    answer.
    """
    if path := os.environ.get(NOTICES):
        # A full disk must not prevent the answer to the server.
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(fields) + "\n")


def read_notice(line: str) -> dict[str, Any]:
    """One notice; {} if the line is not valid."""
    try:
        notice = json.loads(line)
    except ValueError:
        return {}
    return notice if isinstance(notice, dict) else {}


def words_for_here(error: FedshiftError) -> str:
    """The text for the client's own operator, with details that the server may not see."""
    return str(getattr(error, "detail", error))
