"""Drawing a figure, and writing its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift import __version__
from fedshift.errors import InputError, unknown
from fedshift.files import clean, write
from fedshift.report.layout import html_page, items, note, section, table
from fedshift.report.shapes import escape
from fedshift.report.tables import markdown
from fedshift_papers.pictures.federations import federation_of
from fedshift_papers.pictures.picture import Figure, Shown
from fedshift_papers.protocols.study import missing_data
from fedshift_papers.reproduce.output import PAGE, RESULTS, page_text, write_drawings
from fedshift_papers.reproduce.reproduce import Request, make_places


@dataclass(frozen=True)
class Drawing:
    """A drawn figure: what it shows by data set, why other data sets are missing, and its page."""

    figure: Figure
    command: str
    shown: Mapping[str, Shown]
    problems: tuple[str, ...]
    page: Path

    @property
    def notes(self) -> tuple[str, ...]:
        """The sentences at the foot of the page."""
        others = (n for one in self.shown.values() for n in one.notes)
        differs = (
            f"{d}: {self.figure.differs[d]}." for d in self.shown if d in self.figure.differs
        )
        return tuple(dict.fromkeys((*differs, *self.figure.chosen, *others)))


def draw(figure: Figure, request: Request) -> Drawing:
    """Draw what is asked for and write its files.

    Raises InputError for an option that the figure does not take, and for unknown names.
    """
    _check(figure, request)
    done, problems = _shown(figure, request)
    make_places(request, figure.name)
    page = request.out / _folder(figure) / "index.html"
    drawing = Drawing(figure, request.command(), done, tuple(problems), page)
    _write(request.out / _folder(figure), drawing)
    write(page, _html(drawing))
    write(page.with_name(RESULTS), json.dumps(document_of(drawing), indent=1) + "\n")
    if request.publish is not None:
        _write(request.publish / _folder(figure), drawing, one_file=True)
    return drawing


def _shown(figure: Figure, request: Request) -> tuple[dict[str, Shown], list[str]]:
    """(what is drawn by data set, or under "" if it needs none; why other sets are missing)."""
    if request.counts is not None and figure.of_counts is not None:
        return {"": figure.of_counts(federation_of(request.counts))}, []
    seed = 0 if request.seeds is None else request.seeds[0]
    rounds = request.rounds or figure.rounds
    if not figure.datasets:
        return {"": figure.draw("", seed, rounds)}, []
    done, problems = dict[str, Shown](), list[str]()
    for name in request.datasets or figure.datasets:
        why = missing_data(name)
        if why is None:
            done[name] = figure.draw(name, seed, rounds)
        else:
            problems.append(why)
    return done or {figure.datasets[0]: figure.without}, problems


def _folder(figure: Figure) -> str:
    return figure.name.rpartition("/")[2]


def _check(figure: Figure, request: Request) -> None:
    # An option counts as given if it differs from its default.
    plain = Request(request.target, request.out)
    named = {
        "--split": "splits", "--methods": "methods", "-c": "overrides", "--jobs": "jobs",
        "--backend": "backend", "--tune": "tune", "--no-train": "train", "--dataset": "datasets",
        "--seeds": "seeds", "--rounds": "rounds", "--counts": "counts",
    }  # fmt: skip
    given = [o for o, f in named.items() if getattr(request, f) != getattr(plain, f)]
    if others := [option for option in given if option not in figure.takes]:
        *first, last = figure.takes
        raise InputError(
            f"{others[0]}: nothing is trained for {figure.name}; it takes {', '.join(first)} and "
            f"{last}"
        )
    if request.counts is not None and request.datasets:
        raise InputError("--dataset: --counts says whose label counts are drawn; leave out one")
    if request.seeds is not None and len(request.seeds) != 1:
        raise InputError(f"--seeds: {figure.name} is drawn for one seed; give one, as in 0")
    if request.rounds is not None and request.rounds < 1:
        raise InputError(f"--rounds {request.rounds}; give 1 or more")
    for name in request.datasets:
        allowed = {*figure.datasets, *figure.extra}
        if name not in allowed:
            raise unknown(f"data set of {figure.name}", name, allowed)


def _panels(drawing: Drawing) -> dict[str, tuple[str, str]]:
    """File name -> (drawing, caption)."""
    return {
        "-".join(filter(None, (dataset, name))): (panel.drawing, panel.caption)
        for dataset, shown in drawing.shown.items()
        for name, panel in shown.panels.items()
    }


def _write(folder: Path, drawing: Drawing, one_file: bool = False) -> None:
    figure, foot = drawing.figure, (*drawing.problems, *drawing.notes)
    captions = write_drawings(folder, figure.title, _panels(drawing), one_file)
    tables = [markdown(t) for shown in drawing.shown.values() for t in shown.tables]
    text = page_text(figure.name, figure.title, drawing.command, tables, captions, foot)
    write(folder / PAGE, text)


def document_of(drawing: Drawing) -> dict[str, Any]:
    """The figure as one JSON value: its tables and its foot."""
    tables = [
        {"dataset": name, "caption": t.caption, "header": t.header, "rows": t.rows}
        for name, shown in drawing.shown.items()
        for t in shown.tables
    ]
    value: dict[str, Any] = clean({
        "figure": drawing.figure.name, "title": drawing.figure.title, "fedshift": __version__,
        "command": drawing.command, "drawings": sorted(_panels(drawing)), "tables": tables,
        "notes": drawing.notes, "problems": drawing.problems,
    })  # fmt: skip
    return value


def _html(drawing: Drawing) -> str:
    parts = [note(drawing.figure.name), f"<p><code>{escape(drawing.command)}</code></p>"]
    if drawing.problems:
        parts.append(section("problems", "Not drawn", items(drawing.problems)))
    tables = [table(t) for shown in drawing.shown.values() for t in shown.tables]
    parts += [section("table", "The numbers", *tables)] if tables else []
    figures = [
        f"<figure>{text}<figcaption>{escape(words)}</figcaption></figure>"
        for text, words in _panels(drawing).values()
    ]
    parts += [section("plots", "Drawings", *figures)] if figures else []
    parts += [section("notes", "What was chosen", items(drawing.notes))]
    return html_page(drawing.figure.title, parts, images=True)
