"""A figure that is drawn from data alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedshift.papers.pictures.federations import Federation
from fedshift.report.tables import Table

# From the data set's name ("" where a figure has none), a seed and a number of rounds.
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

    datasets  drawn where none is named; () for a figure of no data set
    extra     further ones that --dataset takes
    differs   data set -> in what it is not the paper's
    chosen    what the paper leaves open, and what we took
    rounds    what --rounds changes; 0 where there are none
    without   what is shown where the data are missing
    of_counts draws it of other label counts, for --counts; no seed changes such a figure
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
    of_counts: Callable[[Federation], Shown] | None = None

    @property
    def takes(self) -> tuple[str, ...]:
        """The options of the command line that it has."""
        data = ["--dataset"] * bool(self.datasets)
        how = ["--seeds"] if self.of_counts is None else ["--counts"]
        return (*data, *how, *["--rounds"] * bool(self.rounds), "--out", "--publish")
