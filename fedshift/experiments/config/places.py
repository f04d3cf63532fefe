"""Where a key was set: a line of the experiment file, or -c on the command line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fedshift.errors import InputError
from fedshift.experiments.config.toml_lines import Key, lines_of

# `section.key` and `[section]`, as messages write them; not within longer names, as those of files.
_NAMED = re.compile(r"(?<![\w./])(?:([a-z]+)\.([a-z_]+)\b(?![./(])|\[([a-z]+)\])")


def keys_set(overrides: tuple[str, ...]) -> list[str]:
    """The keys that -c sets, as section.key."""
    return [".".join(k.strip() for k in o.partition("=")[0].split(".")) for o in overrides]


@dataclass(frozen=True)
class Source:
    """What a configuration was read from: the text of a file, and what -c set after it.

    dropped  options of the file's method that the one named by -c does not have
    """

    origin: str = "config"
    text: str = ""
    overrides: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @cached_property
    def lines(self) -> dict[Key, int]:
        """The line of every key."""
        return lines_of(self.text)

    def place(self, key: Key) -> str:
        """Where `key` is set: `f.toml:7`, `-c method.mu`, or the file where it is set nowhere."""
        dotted, given = ".".join(key), keys_set(self.overrides)
        # -c wins over the file, so it is the place of a key that both set.
        for path in given:
            if f"{dotted}.".startswith(f"{path}."):
                return f"-c {path}"
        line = line_in(self.lines, key)
        place = f"{self.origin}:{line}" if line else self.origin
        # The fault of a section may come from the file or from -c.
        within = [path for path in given if not dotted or path.startswith(f"{dotted}.")]
        return f"{place} with -c {', '.join(within)}" if within else place

    def about(self, key: Key, message: str) -> Key:
        """The key that a message is about, where `key` is a section or nothing: one it names.

        That is the first that is set, with its section or, within `key`, alone; else `key`.
        """
        if len(key) > 1:
            return key
        named: list[Key] = [
            (one[3],) if one[3] else (one[1], one[2]) for one in _NAMED.finditer(message)
        ]
        within: list[Key] = [(*key, word) for word in re.findall(r"\w+", message)] if key else []
        given = {*self.lines, *(tuple(path.split(".")) for path in keys_set(self.overrides))}
        # A message may name keys that only have defaults; the user can find those that were set.
        whole = [one for one in (*named, *within) if len(one) > 1 and one in given]
        partly = [one for one in named if one[:1] in given]
        return next(iter((*whole, *([key] if key else partly))), ())

    def placed(self, message: str, key: Key = ()) -> str:
        """The message, headed by where that was set which it is about; a key is named once."""
        place = self.place(self.about(key, message))
        # "-c method.mu: method.mu must be ..." would say the key twice.
        if place.startswith("-c ") and re.match(rf"{re.escape(place[3:])}(?![\w.])", message):
            return f"-c {message}"
        return f"{place}: {message}"

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Errors raised within are `placed`, where they are about a key that was set."""
        try:
            yield
        except InputError as e:
            if self.about((), str(e)):
                e.args = (self.placed(str(e)),)
            raise


def line_in(lines: dict[Key, int], key: Key) -> int | None:
    """The 1-based line where `key` (or else its section) is written, None where it is not."""
    written = (key[:length] for length in range(len(key), 0, -1) if key[:length] in lines)
    return next((lines[part] for part in written), None)
