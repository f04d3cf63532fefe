"""The tables of faults in docs/flower.md have the messages of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("flower", "experiments", "engine", "record", "../fedshift_deploy")
# Said by the system, which the code only passes on, and put together from a certificate's parts.
SYSTEMS = "Connection refused|Address already in use|Subject Key Identifier and no Key Usage"
# What stands for something else in a message: names, numbers, addresses, and what is left out.
VARIES = re.compile(
    rf'\.\.\.|"[^"]*"|\[[\d, ]+\]|[\d.]+(:\d+)?|client-\d|^\S+: |ahead of|{SYSTEMS}'
)


@cache
def pieces() -> set[str]:
    """The fixed parts of all texts in these rooms."""
    texts: set[str] = set()
    package = ROOT / "fedshift"
    rooms = [path for room in ROOMS for path in (package / room).rglob("*.py")]
    for path in (package / "files.py", *rooms):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(" ".join(node.value.split()))
    return texts


def messages() -> list[str]:
    """The first column of the two tables, a message each."""
    text = (ROOT / "docs" / "flower.md").read_text()
    begin = text.index("What to do where `server` says")
    tables = text[begin : text.index("\n#", begin)]
    cells = [line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| `")]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def missing(message: str, texts: set[str]) -> list[str]:
    """The parts of a message that no text of the code has; a part may span several texts."""
    parts = [part.strip(" :;,()") for part in VARIES.sub("\0", message).split("\0")]
    return [p for p in parts if len(p) > 8 and not any(p in t or _within(p, t) for t in texts)]


def _within(part: str, text: str) -> bool:
    """Whether a part contains a text that is most of it: `is not the key of {name}` and others."""
    return len(text) > 8 and text.strip(" :;,()") in part


@pytest.mark.parametrize("message", messages())
def test_each_message_is_one_of_the_codes(message: str) -> None:
    assert missing(message, pieces()) == []


def test_other_words_are_missed() -> None:
    """The control: a message that is changed in the code alone."""
    assert missing("`...` has no key that it knows of", pieces())
    assert len(messages()) > 20
