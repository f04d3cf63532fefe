"""Errors that a user can act on, each with its exit code on the command line."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any


class FedshiftError(Exception):
    """A failure with a message for the user; the command line prints it without a traceback."""

    exit_code = 70

    def __str__(self) -> str:
        """The message, with control characters made visible so that no terminal obeys them."""
        return visible(super().__str__(), keep="\n")


class InputError(FedshiftError, ValueError):
    """A bad value, file or option. The message has what was given, what is allowed, and a cure."""

    exit_code = 2


class DataError(InputError):
    """A data set that is missing, truncated or not what it should be."""

    exit_code = 3


class UnfitError(InputError):
    """A backend that cannot train this network or method on any client."""


class TrainingError(FedshiftError, RuntimeError):
    """Training that cannot go on: a non-finite or misshapen update, named by its client."""

    exit_code = 4


class DivergedError(TrainingError):
    """Numbers that are no longer finite. Training again would end in the same way.

    measured  the metrics of the rounds before, if a run was under way
    """

    measured: Sequence[Any] = ()


class NetworkError(FedshiftError, OSError):
    """A download that failed."""

    exit_code = 5


class NeedlessWarning(UserWarning):
    """A setting that changes nothing."""


def visible(text: str, keep: str = "") -> str:
    """Text with control characters written out, as in \\x1b: names may come from other people.

    Line ends count as such, and marks that change the direction of writing or have no width.
    Characters in `keep` stay as they are.
    """
    return "".join(c if _harmless(c) or c in keep else repr(c)[1:-1] for c in text)


def _harmless(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def shown(text: str, most: int = 60) -> str:
    """A given text for a message: on one line, without control characters, shortened if long."""
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    return visible(text)


def from_elsewhere(text: str, most: int = 500) -> str:
    """A text from another machine, for messages, logs and results: `shown`, on a single line."""
    return shown(" ".join(text.split()), most)


def nearest(given: str, allowed: Iterable[str]) -> str:
    """` Did you mean "x"?` for the closest allowed name, or an empty string when none is close."""
    names = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(given.lower(), list(names), n=1, cutoff=0.5)
    return f' Did you mean "{shown(names[close[0]])}"?' if close else ""


def check_name(what: str, given: object, allowed: Iterable[str]) -> None:
    """Raise the error of `unknown` for anything but one of the allowed names."""
    names = list(allowed)
    if given not in names:
        raise unknown(what, str(given), names)


def unknown(what: str, given: str, allowed: Iterable[str]) -> InputError:
    """The error for a name outside a fixed list, with the list and the nearest match."""
    names = sorted(allowed)
    given = given if isinstance(given, str) else repr(given)
    return InputError(
        f'unknown {what} "{shown(given)}"; allowed: {", ".join(names)}.{nearest(given, names)}'
    )
