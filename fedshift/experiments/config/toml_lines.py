"""Where the keys of a TOML text are written: what `tomllib` does not tell."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Sections, keys and places in arrays, from the outside in: ("shift", "target", "0").
Key = tuple[str, ...]

# Strings first, so that brackets and # within them are no tokens of their own.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'"
    r"|\#[^\n]*" r"|\n" r"|[\[\]{}=,.]" r"|[^\s\#\"'\[\]{}=,.]+",
    re.DOTALL,
)  # fmt: skip


class _Holder(NamedTuple):
    """An array or inline table that is open, and which element of it is being read."""

    key: Key
    array: bool
    element: int = 0


@dataclass
class _Reader:
    """What has been read of a text that is valid TOML."""

    lines: dict[Key, int] = field(default_factory=dict)
    section: Key = ()
    # How many [[tables]] of each name there were.
    arrays: Counter[Key] = field(default_factory=Counter)
    holders: list[_Holder] = field(default_factory=list)
    # The parts of the name being read, and where it began.
    name: list[str] = field(default_factory=list)
    began: int = 0
    # The key of the value being read, None where a name is due.
    value: Key | None = None
    # How many brackets opened the header being read.
    header: int = 0

    def take(self, token: str, line: int) -> None:
        if token.startswith("#"):
            return
        if self.value is not None:
            self._in_value(token, line)
        elif self.header:
            self._in_header(token, line)
        else:
            self._in_name(token, line)

    def _in_name(self, token: str, line: int) -> None:
        if token == "[" and not self.holders:
            self.header, self.name = 1, []
        elif token == "=":
            outer = self.holders[-1].key if self.holders else self.section
            self.value = outer + tuple(self.name)
            self._note(self.value, self.began)
            self.name = []
        elif token == "}":
            self._close()
        elif token not in "].,\n":
            self.began = self.began if self.name else line
            self.name.append(_unquoted(token))

    def _in_header(self, token: str, line: int) -> None:
        if token == "[":
            self.header = 2
        elif token == "]":
            self.section = self._numbered(tuple(self.name), self.header == 2)
            self._note(self.section, line)
            self.header, self.name = 0, []
        elif token != ".":
            self.name.append(_unquoted(token))

    def _in_value(self, token: str, line: int) -> None:
        holder = self.holders[-1] if self.holders else None
        if token in "]}":
            self._close()
        # Within an array or inline table a line break ends nothing.
        elif token == "\n":
            self.value = self.value if holder else None
        elif token == ",":
            self._next()
        else:
            # Elements get lines of their own: a bad one in a long list is pointed at.
            if holder and holder.array:
                self.value = (*holder.key, str(holder.element))
                self._note(self.value, line)
            if token in "[{":
                self.holders.append(_Holder(self.value or (), token == "["))
                self.value = self.value if token == "[" else None

    def _next(self) -> None:
        """After a comma: the next element, or the next name."""
        holder = self.holders[-1]
        self.holders[-1] = holder._replace(element=holder.element + 1)
        self.value = holder.key if holder.array else None

    def _close(self) -> None:
        self.value = self.holders.pop().key

    def _note(self, key: Key, line: int) -> None:
        """Record the line of a key, and of sections it creates, at their first occurrence."""
        while key and key not in self.lines:
            self.lines[key] = line
            key = key[:-1]

    def _numbered(self, name: Key, double: bool) -> Key:
        """A header's name, with the number of the last of each [[table]] it goes through."""
        key: Key = ()
        for part in name[:-1]:
            key = (*key, part)
            key = (*key, str(self.arrays[key] - 1)) if key in self.arrays else key
        key = (*key, name[-1])
        if double:
            self.arrays[key] += 1
        return (*key, str(self.arrays[key] - 1)) if key in self.arrays else key


def lines_of(text: str) -> dict[Key, int]:
    """The 1-based line of every section, key and element of an array in a valid TOML text."""
    reader = _Reader()
    for token, line in _tokens(text):
        reader.take(token, line)
    return reader.lines


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line, last = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", last, match.start())
        last = match.start()
        yield match.group(), line


def _unquoted(token: str) -> str:
    """A part of a name without its quotes."""
    return str(tomllib.loads(f"v = {token}")["v"]) if token[0] in "\"'" else token
