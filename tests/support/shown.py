"""Whether a page shows what its code prints."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def alike(shown: str, printed: str) -> bool:
    """Whether the words are the same and the numbers close; a line of ... stands for any lines.

    Training gives slightly other numbers on other processors. So numbers may differ by a twentieth,
    and those with one decimal or none (percentages, counts) by 1.5.
    """
    lines = shown.splitlines()
    match = re.fullmatch("".join(map(_pattern, lines)), printed)
    numbers = [n for line in lines for n in NUMBER.findall(line)]
    return match is not None and all(map(_close, numbers, match.groups()))


def _pattern(line: str) -> str:
    """A regular expression for a line: numbers are groups, and spaces as many as there are."""
    if line.strip() == "...":
        return r"(?:.*\n)*?"
    words = (NUMBER.split(word) for word in line.split())
    pattern = r" +".join(f"({NUMBER.pattern})".join(map(re.escape, w)) for w in words)
    return rf" *{pattern} *\n"


def _close(a: str, b: str) -> bool:
    least = 1.5 if len(a.partition(".")[2]) < 2 else 0.0
    return abs(float(a) - float(b)) <= max(least, abs(float(a)) / 20)
