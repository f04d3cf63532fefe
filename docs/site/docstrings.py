"""How docstrings are shown in the reference: lists of arguments and examples as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

# "name    what it is", and lines that go on with it, which are indented further.
ENTRY = re.compile(r"^(\w[\w, .*]*?)  +(\S.*)$")


def markdown_of(text: str) -> str:
    """A docstring as Markdown: lists of arguments as lists, examples as code."""
    return "\n\n".join(_block(block) for block in re.split(r"\n\s*\n", text))


def _block(block: str) -> str:
    lines = block.split("\n")
    if lines[0].startswith(">>> "):
        return "\n".join(["```pycon", *lines, "```"])
    if not ENTRY.match(lines[0]):
        return block
    items: list[str] = []
    for line in lines:
        entry = ENTRY.match(line)
        if entry:
            names = re.sub(r"(\w+)", r"`\1`", entry[1])
            items.append(f"- {names}: {entry[2]}")
        else:
            items.append(f"  {line.strip()}")
    return "\n".join(items)


class Shown(griffe.Extension):
    """Applies `markdown_of` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown_of(obj.docstring.value)
