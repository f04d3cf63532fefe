"""Keep control characters out of the logs of Flower's processes.

Texts from other machines go into these logs. A terminal that shows a log obeys such characters:
they could clear lines, and write others.
"""

from __future__ import annotations

import logging
from typing import Any

from fedshift.errors import FedshiftError, visible


def show_controls() -> None:
    """Make all log records of this process show control characters as text, as in \\x1b.

    Line breaks are kept in formats and tracebacks, which are Flower's own, but not in values.
    """
    made = logging.getLogRecordFactory()

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        one = made(*args, **more)
        one.msg = visible(str(one.msg), keep="\n\t")
        if isinstance(one.args, tuple):
            one.args = tuple(_shown(value) for value in one.args)
        if one.exc_info:
            # Formatters use exc_text, if it is set, instead of formatting the traceback.
            text = logging.Formatter().formatException(one.exc_info)
            one.exc_text = visible(text, keep="\n\t")
        return one

    logging.setLogRecordFactory(record)


def leave_out_tracebacks() -> None:
    """Make log records of this process show errors for users in one line, without a traceback."""
    made = logging.getLogRecordFactory()

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        """A log record of the former factory, with errors for users in one line."""
        one = made(*args, **more)
        if one.exc_info and isinstance(one.exc_info[1], FedshiftError):
            one.msg, one.args = f"{one.getMessage()}: {one.exc_info[1]}", ()
            one.exc_info = one.exc_text = None
        return one

    logging.setLogRecordFactory(record)


def _shown(value: object) -> object:
    # Keep numbers, because formats such as %d need them.
    return value if isinstance(value, int | float) else visible(str(value))
