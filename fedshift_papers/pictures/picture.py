"""A figure that is drawn from data, without training runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedshift.report.tables import Table
from fedshift_papers.pictures.federations import Federation

# Draws a figure. Arguments: the data set's name ("" for a figure without one), a seed, and a
# number of rounds.
Draw = Callable[[str, int, int], "Shown"]


@dataclass(frozen=True)
class Panel:
    """A drawing as SVG text, and what it shows in one line."""

    drawing: str
    caption: str


@dataclass(frozen=True)
class Shown:
    """The content of a figure's page: drawings by file name, tables, and sentences below them."""

    panels: Mapping[str, Panel] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A figure, and how to draw it.

    datasets  data sets that are drawn if the user names none; () for a figure without data
    extra     further data sets that --dataset takes
    differs   data set -> how it differs from the paper's
    chosen    sentences on what the paper leaves open, and what we took
    rounds    the number of rounds that --rounds changes; 0 for a figure without rounds
    without   what the page shows if the data are missing
    of_counts draws the figure for label counts of the user's, as --counts gives them; such a
              figure does not depend on a seed
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
        """The options of the command line that apply to this figure."""
        data = ["--dataset"] * bool(self.datasets)
        how = ["--seeds"] if self.of_counts is None else ["--counts"]
        return (*data, *how, *["--rounds"] * bool(self.rounds), "--out", "--publish")
