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
    try:
        with in_python_words():
            yield
    except FedshiftError as e:
        if e.args:
            e.args = (with_names(str(e.args[0]), clients), *e.args[1:])
        raise


def with_names(text: str, clients: Sequence[str]) -> str:
    """A message about client 2, about `client "north"`."""

    def named(match: re.Match[str]) -> str:
        i = int(match[1])
        return f'client "{clients[i]}"' if i < len(clients) else match[0]

    return re.sub(r"\bclient (\d+)\b", named, text)
