"""Seeds and grids as they are typed."""

from __future__ import annotations

import re

from fedshift.errors import InputError


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "0-2,5" as (0, 1, 2, 5). Raises InputError for anything else."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= first + 999:
            raise InputError(
                f'--seeds "{text}": write numbers and ascending ranges of at most 1,000, as in 0-7 '
                "or 0,2,5"
            )
        seeds += range(first, last + 1)
    return tuple(dict.fromkeys(seeds))
