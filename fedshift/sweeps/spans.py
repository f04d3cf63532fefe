"""Parsing seeds and grids as users type them."""

from __future__ import annotations

import re
import tomllib

from fedshift.errors import InputError

# A comma outside brackets and quotes.
BETWEEN = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)(?![^\[{]*[\]}])""")


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "0-2,5" as (0, 1, 2, 5). Raises InputError for text of another form."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        # Text of another form becomes the empty range (1, 0), which is refused below.
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= first + 999:
            raise InputError(
                f'--seeds "{text}": write numbers and ascending ranges of at most 1,000, as in 0-7 '
                "or 0,2,5"
            )
        seeds += range(first, last + 1)
    return tuple(dict.fromkeys(seeds))


def values_of(override: str) -> tuple[str, tuple[str, ...]]:
    """The key of one -c, and the values that it lists: "training.lr=0.01,0.1" has two.

    Text that is a single TOML value, such as [100, 50], is one value.
    """
    key, equals, text = override.partition("=")
    if not equals:
        return key.strip(), ("",)  # `apply_override` will refuse it with a message
    try:
        tomllib.loads(f"v = {text}")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        parts = tuple(part.strip() for part in BETWEEN.split(text))
    else:
        parts = (text.strip(),)
    if len(parts) > 1 and not all(parts):
        raise InputError(f'-c "{override}": an empty value in the list; write it as 0.01,0.1')
    if double := next((p for p in parts if parts.count(p) > 1), None):
        raise InputError(f'-c "{override}": {double} is there twice')
    return key.strip(), parts
