"""A drawing of a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """SVG text, and what it shows in one line."""

    svg: str
    caption: str
