"""Errors that name clients as the user does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedshift.errors import FedshiftError
from fedshift.fitting.keys import in_python_words


@contextmanager
def by_name(clients: Sequence[str]) -> Iterator[None]:
    """Errors raised within say `client "north"` for client 2, and keywords for keys of files."""

    def named(match: re.Match[str]) -> str:
        i = int(match[1])
        return f'client "{clients[i]}"' if i < len(clients) else match[0]

    try:
        with in_python_words():
            yield
    except FedshiftError as e:
        if e.args:
            e.args = (re.sub(r"\bclient (\d+)\b", named, str(e.args[0])), *e.args[1:])
        raise
