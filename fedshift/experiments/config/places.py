"""Says in messages where a key was set: a line of the experiment file, or -c."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fedshift.errors import InputError
from fedshift.experiments.config.toml_lines import Key, lines_of

# `section.key` and `[section]` as messages write them, but not as parts of longer names or paths.
_NAMED = re.compile(r"(?<![\w./])(?:([a-z]+)\.([a-z_]+)\b(?![./(])|\[([a-z]+)\])")


def keys_set(overrides: tuple[str, ...]) -> list[str]:
    """The keys that -c sets, as section.key."""
    return [".".join(k.strip() for k in o.partition("=")[0].split(".")) for o in overrides]


@dataclass(frozen=True)
class Source:
    """What a configuration was read from: the text of a file, and -c.

    dropped  options in the file that the method named by -c does not have
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
        """Where `key` is set: "f.toml:7" or "-c method.mu"; the file's name if it is not set."""
        dotted, given = ".".join(key), keys_set(self.overrides)
        # If both set the key, -c wins over the file, so the mistake is there.
        for path in given:
            if f"{dotted}.".startswith(f"{path}."):
                return f"-c {path}"
        line = line_in(self.lines, key)
        place = f"{self.origin}:{line}" if line else self.origin
        # A mistake in a section as a whole may be in the file or in what -c sets of it.
        within = [path for path in given if not dotted or path.startswith(f"{dotted}.")]
        return f"{place} with -c {', '.join(within)}" if within else place

    def about(self, key: Key, message: str) -> Key:
        """The key that a message is about: `key`, unless that is a whole section or ().

        Otherwise the first key in the message that the user has set, in the form section.key. A key
        of the section `key` may be named without its section. If there is none, `key` itself.
        """
        if len(key) > 1:
            return key
        named: list[Key] = [
            (one[3],) if one[3] else (one[1], one[2]) for one in _NAMED.finditer(message)
        ]
        within: list[Key] = [(*key, word) for word in re.findall(r"\w+", message)] if key else []
        given = {*self.lines, *(tuple(path.split(".")) for path in keys_set(self.overrides))}
        # A message may also name keys that the user did not set, and cannot find in the file.
        whole = [one for one in (*named, *within) if len(one) > 1 and one in given]
        partly = [one for one in named if one[:1] in given]
        return next(iter((*whole, *([key] if key else partly))), ())

    def placed(self, message: str, key: Key = ()) -> str:
        """The message with the place of its key in front."""
        place = self.place(self.about(key, message))
        # Not "-c method.mu: method.mu must be ...", which would say the key twice.
        if place.startswith("-c ") and re.match(rf"{re.escape(place[3:])}(?![\w.])", message):
            return f"-c {message}"
        return f"{place}: {message}"

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Within the block, errors about a key that the user has set get its place in front."""
        try:
            yield
        except InputError as e:
            if self.about((), str(e)):
                e.args = (self.placed(str(e)),)
            raise


def line_in(lines: dict[Key, int], key: Key) -> int | None:
    """The 1-based line of `key`, or else of its section; None if neither is written."""
    written = (key[:length] for length in range(len(key), 0, -1) if key[:length] in lines)
    return next((lines[part] for part in written), None)
