"""Notices from a client's app to the client's operator, who watches `fedshift deploy client`.

The app runs in a process of its own for each message, and its output goes to Flower's log. So it
appends lines of JSON to a file, which `deploy client` names, reads and removes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any

from fedshift.errors import FedshiftError

LOG = logging.getLogger("fedshift.flower")
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


def tell_here(error: Exception) -> None:
    """Tell the client's operator why there is no answer, with details that the server may not see.

    Unexpected errors have a traceback in the log.
    """
    if isinstance(error, FedshiftError):
        text = str(getattr(error, "detail", error))
        LOG.error("no answer: %s", text)
    else:
        text = f"the client failed ({type(error).__name__}: {error}); its log has the traceback"
        LOG.exception("the client failed")
    notify(trouble=f"this client gave the server no answer: {text}")
