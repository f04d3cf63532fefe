"""A figure that is drawn from data alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedshift.report.tables import Table

# From the data set's name, a seed and a number of rounds.
Draw = Callable[[str, int, int], "Shown"]


@dataclass(frozen=True)
class Panel:
    """A drawing as SVG text, and what it shows in one line."""

    drawing: str
    caption: str


@dataclass(frozen=True)
class Shown:
    """What a figure has: drawings by file name, tables, and sentences for its foot."""

    panels: Mapping[str, Panel] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One figure.

    datasets  drawn where none is named
    extra     further ones that --dataset takes
    differs   data set -> in what it is not the paper's
    chosen    what the paper leaves open, and what we took
    rounds    what --rounds changes; 0 where there are none
    without   what is shown where the data are missing
    """

    name: str
    title: str
    datasets: tuple[str, ...]
    draw: Draw
    extra: tuple[str, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    rounds: int = 0
    without: Shown = Shown()
