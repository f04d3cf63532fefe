"""Whether a page shows what its code prints."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def alike(shown: str, printed: str) -> bool:
    """Whether the words are the same and the numbers close; a line of ... stands for any lines.

    Training gives slightly other numbers on other processors. So numbers may differ by a twentieth,
    and percentages and small counts (up to 100, with one decimal or none) by 2.
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
    size = abs(float(a))
    few_decimals = len(a.partition(".")[2]) < 2
    return abs(float(a) - float(b)) <= (2 if few_decimals and size <= 100 else size / 20)
