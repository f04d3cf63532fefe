"""The table of a comparison, for a terminal, a notebook, a paper, a data frame and a web page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from fedshift.errors import unknown
from fedshift.files import check_page, write
from fedshift.record.headline import OWN, OWN_MODELS
from fedshift.report import tables
from fedshift.report.charts import Axis, Chart
from fedshift.report.folding import sampled
from fedshift.report.intervals import Moments
from fedshift.report.layout import figure, fold, html_page, items, note, section, table
from fedshift.report.printed import save
from fedshift.sweeps.drawings import Curves, drawings
from fedshift.sweeps.results import CORRECTED, Row, RunResult
from fedshift.sweeps.texts import difference, spread

if TYPE_CHECKING:
    from pandas import DataFrame

NUMBERS = (
    "method", "setting", "seeds", "mean", "sd", "difference", "difference_low95",
    "difference_high95", "paired_seeds", "corrected", "corrected_sd", "corrected_difference",
    "corrected_difference_low95", "corrected_difference_high95", "estimated_accuracy",
    "ess_fraction", "note",
)  # fmt: skip
RUNS = (
    "method", "setting", "chosen", "seed", "state", "value", "target_accuracy_corrected",
    "estimated_accuracy", "validation_accuracy", "source_accuracy", "ess_fraction", "run", "why",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Table:
    """Methods side by side: mean ± sd over seeds, and the paired differences to one of them.

    With x_s and b_s a method's and the base's results at seed s, the difference is the mean of
    x_s - b_s with its 95 % t-interval; there is none below three seeds. A table has
    `markdown()`, `csv()`, `latex()`, `report(path)`, `frame()` and `row(method)`.

    metric  the name of what is compared
    base    the method that differences are taken to
    rows    one per method, at the setting that validation chose
    runs    every run, of settings that were not chosen, too
    notes   what a reader has to know, a sentence each
    curves  by method, the metric over the seeds by round
    folder  where the runs are

    >>> columns = {"client": "hospital", "label": "outcome"}
    >>> task = fs.Task.from_csv("patients.csv", **columns, target="north")
    >>> table = fs.compare(task, "linear", ["fedavg", "fedrs"], rounds=2, seeds=2, jobs=1)
    >>> table.frame()["method"].tolist(), table.row("fedrs").moments.n
    (['fedavg', 'fedrs'], 2)
    """

    title: str
    metric: str
    base: str
    rows: tuple[Row, ...]
    runs: tuple[RunResult, ...]
    notes: tuple[str, ...]
    curves: Curves
    folder: Path

    def row(self, method: str) -> Row:
        """A method's row. Raises InputError, with the nearest match, for one that is not there."""
        by_label = {row.label: row for row in self.rows}
        if method not in by_label:
            raise unknown("method of this table", method, by_label)
        return by_label[method]

    def shown(self) -> tables.Table:
        """The table that is printed."""
        # Some columns are only in some tables: times False, a list or tuple is empty.
        grid = any(row.setting for row in self.rows)
        notes = any(row.note for row in self.rows)
        moved = any(row.corrected for row in self.rows)
        unit = self.words[:1].upper() + self.words[1:] + ", %" * self.percent
        minus = f"Minus {self.base}"
        units, worst = ("Targets", ["Worst tenth"]) if self.targets else ("Seeds", [])
        header = ("Method", *["Chosen"] * grid, units, unit, *worst, minus)
        header += ("Corrected" + ", %" * self.percent, minus) * moved
        numbers = self.estimate == "estimated_rmse"
        estimate = "Estimated RMSE" if numbers else "Estimated"
        header += (estimate, "ESS", *["Missing"] * notes)
        rows = tuple(
            (
                row.label,
                *[row.setting] * grid,
                row.moments.n if row.moments else 0,
                spread(self._scaled(row.moments), self.digits),
                *[row.worst(self.metric)] * len(worst),
                self._difference(row.difference),
                *self._corrected(row) * moved,
                row.mean(self.estimate),
                row.mean("ess_fraction"),
                *[row.note] * notes,
            )
            for row in self.rows
        )
        shown = ".4g" if numbers else ".1%"
        middle = ("r", *[self._spec] * len(worst), "r", *["r"] * (2 * moved))
        formats = ("", *[""] * grid, "d", *middle, shown, ".0%", *[""] * notes)
        return tables.Table(header, rows, formats, self.title)

    @property
    def targets(self) -> bool:
        """Whether runs differ by the client that is held out, and not by their seed."""
        return any(row.targets for row in self.rows)

    @property
    def _spec(self) -> str:
        return ".1%" if self.percent else ".4g"

    def _corrected(self, row: Row) -> tuple[str, str]:
        """The corrected models' number, and its paired difference to the base's, corrected."""
        mean = spread(self._scaled(row.corrected), self.digits)
        return mean, self._difference(row.corrected_difference)

    def _difference(self, of: Moments | None) -> str:
        return difference(self._scaled(of), self.digits, self.unit)

    @property
    def unit(self) -> str:
        """What results are paired by, in a word: "seed" or "target"."""
        return "target" if self.targets else "seed"

    @property
    def estimate(self) -> str:
        """The name of the estimate at the target that these runs have."""
        numbers = any(row.values("estimated_rmse") for row in self.rows)
        return "estimated_rmse" if numbers else "estimated_accuracy"

    @property
    def words(self) -> str:
        """The metric in words: "target accuracy"."""
        if self.metric == OWN:
            return OWN_MODELS
        return self.metric.replace("_", " ").replace("rmse", "RMSE")

    @property
    def percent(self) -> bool:
        """Whether the metric is a share, to be shown in percent; no value may be above 1 then."""
        name = self.metric.removesuffix("_corrected")
        share = name == OWN or name.endswith(("accuracy", "f1", "recall"))
        return share and all(
            abs(v) <= 1 + 1e-9 for row in self.rows for v in row.values(self.metric).values()
        )

    @property
    def digits(self) -> int:
        """Digits after the point; for very large or small numbers, as many as show four digits."""
        if self.percent:
            return 1
        size = max((abs(row.moments.mean) for row in self.rows if row.moments), default=0.0)
        return 3 if size == 0 or 0.01 <= size < 1000 else max(0, 3 - math.floor(math.log10(size)))

    def _scaled(self, of: Moments | None) -> Moments | None:
        return of and of.scaled(100.0 if self.percent else 1.0)

    def numbers(self) -> tables.Table:
        """One line per method with full-precision numbers."""
        rows = tuple(
            (
                row.label,
                row.setting,
                *((m.n, m.mean, m.sd) if (m := row.moments) else (0, None, None)),
                *((d.mean, d.low, d.high, d.n) if (d := row.difference) else (None,) * 4),
                *((c.mean, c.sd) if (c := row.corrected) else (None,) * 2),
                *((e.mean, e.low, e.high) if (e := row.corrected_difference) else (None,) * 3),
                row.mean(self.estimate),
                row.mean("ess_fraction"),
                row.note,
            )
            for row in self.rows
        )
        return tables.Table(self._named(NUMBERS), rows, ("", "", *["g"] * 14, ""), self.title)

    def all_runs(self) -> tables.Table:
        """One line per run with full-precision numbers."""
        chosen = {(row.label, row.setting) for row in self.rows}
        rows = tuple(
            (
                m.method,
                m.setting,
                "yes" if (m.method, m.setting) in chosen else "no",
                m.target or m.seed,
                m.state,
                *(m.number(name) for name in (self.metric, *self._named(RUNS[6:11]))),
                m.run.name,
                m.why,
            )
            for m in self.runs
        )
        formats = ("", "", "", "" if self.targets else "d", "", *["g"] * 6, "", "")
        return tables.Table(self._named(RUNS), rows, formats, "Every run")

    def _named(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        accuracy = "target_accuracy_corrected"
        other = {
            "estimated_accuracy": self.estimate,
            accuracy: CORRECTED.get(self.metric, accuracy),
        }
        return tuple(other.get(c, c.replace("seed", self.unit)) for c in columns)

    def markdown(self) -> str:
        """The table as Markdown, with its notes."""
        notes = "".join(f"- {tables.escape_markdown(text)}\n" for text in self.notes)
        return f"{tables.markdown(self.shown())}\n{notes}"

    def csv(self) -> str:
        """The table as CSV with full-precision numbers; shares are fractions."""
        return tables.csv_text(self.numbers())

    def runs_csv(self) -> str:
        """Every run as CSV."""
        return tables.csv_text(self.all_runs())

    def latex(self) -> str:
        """The table in LaTeX (booktabs), with its notes as comments."""
        return tables.latex(self.shown()) + "".join(f"% {text}\n" for text in self.notes)

    def frame(self, *, runs: bool = False) -> DataFrame:
        """A pandas DataFrame with a row per method, or per run; shares are fractions."""
        import pandas

        table = self.all_runs() if runs else self.numbers()
        return pandas.DataFrame(list(table.rows), columns=list(table.header))

    def plots(self) -> dict[str, Chart]:
        """Charts by what they show: means over seeds or targets, and the metric by round."""
        axis, title = Axis(self.words, percent=self.percent), f"{self.title}: {self.words}"
        rows = {row.label: row.moments for row in self.rows}
        return drawings(title, axis, rows, self.base, self.curves, f"{self.unit}s")

    def figures(self, folder: str | Path) -> tuple[Path, ...]:
        """The drawings as PDF and PNG for a paper. Raises InputError without matplotlib."""
        names = ("means", "rounds")
        charts = {name: [chart] for name, chart in zip(names, self.plots().values(), strict=False)}
        return save(charts, Path(folder))

    def report(self, path: str | Path) -> Path:
        """Write one page with the table, drawings and every run. Raises InputError for no .html."""
        target = Path(path)
        check_page(target)
        # A temporary folder is deleted before the page is read, so the page does not name it.
        temporary = self.folder.parent == Path(gettempdir()) and "fedshift-" in self.folder.name
        place = "" if temporary else f" in {self.folder}"
        parts = [note(f"{len(self.rows)} methods, {len(self.runs)} runs{place}")]
        parts += [section("table", "The table", table(self.shown()), items(self.notes))]
        drawn = [figure(chart, caption) for caption, chart in self.plots().items()]
        by_round = sampled(self.by_round(), "the folders of the runs")
        numbers = [fold(by_round)] if by_round.rows else []
        parts += [section("plots", "Drawings", *drawn, *numbers)]
        if any(row.validation for row in self.rows):
            parts += [section("settings", "What was tried", table(self.tried()))]
        parts += [section("runs", "Every run", table(self.all_runs()))]
        write(target, html_page(self.title, parts))
        return target

    def by_round(self) -> tables.Table:
        """The metric's mean over the seeds, a row per round."""
        rounds = sorted({t for curve in self.curves.values() for t in curve})
        columns = [
            (name, [m.mean if (m := curve.get(t)) else None for t in rounds])
            for name, curve in self.curves.items()
        ]
        return tables.from_columns("Round", list(map(str, rounds)), columns, self._spec)

    def tried(self) -> tables.Table:
        """Every setting with the number that settings were chosen by."""
        rows = tuple(
            (row.label, setting, value, "chosen" if setting == row.setting else "")
            for row in self.rows
            for setting, value in row.validation.items()
        )
        shown = ".4g" if self.estimate == "estimated_rmse" else ".2%"
        return tables.Table(("Method", "Setting", "On validation", ""), rows, ("", "", shown, ""))

    def __repr__(self) -> str:
        return "\n".join([tables.plain(self.shown()), *self.notes])

    def _repr_html_(self) -> str:
        return table(self.shown()) + items(self.notes)

    def document(self) -> dict[str, Any]:
        """The table as one JSON value."""

        def listed(of: tables.Table) -> list[dict[str, Any]]:
            return [dict(zip(of.header, row, strict=True)) for row in of.rows]

        return {
            "title": self.title, "metric": self.metric, "base": self.base,
            "methods": listed(self.numbers()), "runs": listed(self.all_runs()),
            "notes": list(self.notes), "folder": str(self.folder),
        }  # fmt: skip
