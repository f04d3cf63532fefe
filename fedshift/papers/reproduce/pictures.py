"""Pictures from label counts: the federation, its weights, the drawing and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.errors import DataError, InputError
from fedshift.files import clean, make_folder, write
from fedshift.papers.protocols.pictures import Federation, Picture
from fedshift.papers.reproduce.output import PAGE, RESULTS
from fedshift.papers.reproduce.simplex import Simplex, simplex_svg
from fedshift.report.charts import Axis, LineChart, Series
from fedshift.report.csv_counts import read_counts
from fedshift.report.looks import look_of
from fedshift.report.shapes import alone
from fedshift.report.svg import svg
from fedshift.report.tables import Table, escape_markdown, markdown
from fedshift.server.pals import PalsWeights, pals_weights

# The client of a file of counts that is none: its counts are the target's.
TARGET_ROW = "target"
# Points of the path along lambda.
PATH = 60


@dataclass(frozen=True)
class Weighed:
    """The weights at one effective sample size."""

    label: str
    solved: PalsWeights


def federation_of(path: Path) -> Federation:
    """The clients of a CSV file of label counts; its row "target" has the target's.

    Raises DataError for a damaged file, and where the target or all clients are missing.
    """
    table = read_counts(path)
    if TARGET_ROW not in table.clients:
        raise DataError(
            f'{path}: no row is named "{TARGET_ROW}"; add one with the target\'s counts or shares'
        )
    at = table.clients.index(TARGET_ROW)
    others = [i for i in range(len(table.clients)) if i != at]
    if not others:
        raise DataError(f"{path}: no clients beside the target; add a row for each")
    total = table.counts[at].sum()
    if not total > 0:
        raise DataError(f"{path}: the target has no examples; give counts or shares above 0")
    names = tuple(table.clients[i] for i in others)
    return Federation(table.counts[others], table.counts[at] / total, names, table.classes)


def weighed(picture: Picture, federation: Federation) -> list[Weighed]:
    """The picture's weights by effective sample size, the smallest first, each once.

    A fraction that lambda = 0 reaches by itself is left out.
    """
    made: list[Weighed] = []
    for fraction in picture.ess:
        given: dict[str, float] = {"ess": fraction} if fraction else {"lam": 0.0}
        solved = pals_weights(federation.counts, federation.target, **given)  # type: ignore[arg-type]
        label = f"ESS {100 * fraction:g} %" if fraction else "lambda = 0"
        if all(solved.lam != one.solved.lam for one in made):
            made.append(Weighed(label, solved))
    return made


def drawing(picture: Picture, federation: Federation) -> str:
    """The picture as SVG text. Raises InputError for a simplex of other than three labels."""
    if picture.kind == "weights":
        return svg(weights_chart(picture, federation))
    if len(federation.classes) != 3:
        raise InputError(
            f"{picture.name} shows three labels, the counts have {len(federation.classes)}; merge "
            "columns, or draw fedpals/fig4 of them"
        )
    return simplex_svg(_simplex(picture, federation))


def weights_chart(picture: Picture, federation: Federation) -> LineChart:
    """A line per effective sample size over the clients in order of size; FedAvg's as dots."""
    sizes = federation.counts.sum(1)
    order = np.argsort(-sizes, kind="stable")
    x = tuple(float(k) for k in range(1, len(order) + 1))
    lines = [
        Series(f"FedPALS, {one.label}", x, tuple(one.solved.weights[order].tolist()))
        for one in weighed(picture, federation)
    ]
    shares = tuple((sizes / sizes.sum())[order].tolist())
    dots = Series("FedAvg", x, shares, look=look_of("fedavg"), line=False)
    across = Axis("client, the largest first")
    return LineChart(picture.title, (*lines, dots), across, Axis("weight", zero=True))


def _simplex(picture: Picture, federation: Federation) -> Simplex:
    counts, target = federation.counts, federation.target
    sizes = counts.sum(1)
    there = sizes > 0
    rows = counts[there] / sizes[there, None]
    named = weighed(picture, federation)
    nearest = named[0].solved
    # Evenly in ESS, since lambda goes to infinity: from lambda = 0's to all examples.
    steps = np.linspace(nearest.ess_fraction, 1.0, PATH)[1:]
    solved = [nearest, *(pals_weights(counts, target, ess=f) for f in steps)]
    return Simplex(
        picture.title,
        federation.classes,
        tuple(n for n, some in zip(federation.clients, there, strict=True) if some),
        rows,
        sizes[there],
        target,
        sizes[there] / sizes.sum() @ rows,
        np.array([one.weights[there] @ rows for one in solved]),
        tuple((f"FedPALS, {n.label}", n.solved.weights[there] @ rows) for n in named),
    )


def numbers(picture: Picture, federation: Federation) -> Table:
    """A line per effective sample size, and one of FedAvg."""
    sizes = federation.counts.sum(1)
    every = pals_weights(federation.counts, federation.target, lam=np.inf)
    lines = [*weighed(picture, federation), Weighed("FedAvg", every)]
    rows = tuple(
        (
            one.label,
            one.solved.lam,
            one.solved.ess_fraction,
            float(np.square(one.solved.residual).sum()),
            float(one.solved.weights.max()),
            int(((one.solved.weights == 0) & (sizes > 0)).sum()),
        )
        for one in lines
    )
    header = ("Weights", "Lambda", "ESS", "||T - S'a||²", "Largest weight", "Clients left out")
    return Table(header, rows, ("", ".4g", ".1%", ".4f", ".4f", "d"))


def draw_picture(
    picture: Picture, federation: Federation, command: str, source: str, places: Sequence[Path]
) -> Path:
    """Write the drawing and its page into each place, numbers into the first; returns its page.

    source: where the counts come from, a sentence.
    """
    drawn, table = alone(drawing(picture, federation)), numbers(picture, federation)
    name, title = f"{picture.kind}.svg", escape_markdown(picture.title)
    notes = "".join(f"- Chosen: {escape_markdown(text)}\n" for text in (source, *picture.chosen))
    parts = (f"# {picture.name}: {title}\n", f"`{command}`\n", f"![{name}]({name})\n\n{title}\n")
    page = "\n".join((*parts, markdown(table), notes))
    values = json.dumps(document(picture, table), indent=1) + "\n"
    for place in places:
        folder = place / picture.folder
        make_folder(folder)
        for file, content in ((name, drawn), (PAGE, page)):
            write(folder / file, content)
    write(places[0] / picture.folder / RESULTS, values)
    return places[0] / picture.folder / PAGE


def document(picture: Picture, table: Table) -> dict[str, Any]:
    """The picture's numbers as one JSON value."""
    keys = ("weights", "lambda", "ess_fraction", "squared_distance", "largest", "left_out")
    lines = [dict(zip(keys, row, strict=True)) for row in table.rows]
    value: dict[str, Any] = clean(
        {"study": picture.name, "title": picture.title, "lines": lines, "notes": picture.chosen}
    )
    return value
