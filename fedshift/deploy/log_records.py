"""Logs of Flower's processes without control characters: what other machines say goes into them.

A terminal obeys such characters when the log is shown: they clear lines, and write others.
"""

from __future__ import annotations

import logging
from typing import Any

from fedshift.errors import FedshiftError, visible


def show_controls() -> None:
    """Have all log records of this process show control characters, as in \\x1b.

    Line breaks stay in formats and tracebacks, which are Flower's; in values they are shown, too.
    """
    made = logging.getLogRecordFactory()

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        one = made(*args, **more)
        one.msg = visible(str(one.msg), keep="\n\t")
        if isinstance(one.args, tuple):
            one.args = tuple(_shown(value) for value in one.args)
        if one.exc_info:
            # What a formatter takes instead of writing the traceback itself.
            text = logging.Formatter().formatException(one.exc_info)
            one.exc_text = visible(text, keep="\n\t")
        return one

    logging.setLogRecordFactory(record)


def leave_out_tracebacks() -> None:
    """Have log records of this process give errors for users in a line, without a traceback."""
    made = logging.getLogRecordFactory()

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        one = made(*args, **more)
        if one.exc_info and isinstance(one.exc_info[1], FedshiftError):
            one.msg, one.args = f"{one.getMessage()}: {one.exc_info[1]}", ()
            one.exc_info = one.exc_text = None
        return one

    logging.setLogRecordFactory(record)


def _shown(value: object) -> object:
    # Formats may want numbers, as in %d.
    return value if isinstance(value, int | float) else visible(str(value))
