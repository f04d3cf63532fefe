"""The report's parts with charts over the rounds: accuracy or error, loss, and time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from fedshift.record.folder import EVENTS, METRICS
from fedshift.record.rounds import Round
from fedshift.report.charts import Axis, LineChart, Series
from fedshift.report.folding import each_run, sampled
from fedshift.report.layout import figure, fold, note, section, table
from fedshift.report.looks import Look
from fedshift.report.means import mean_cell, moments_of, with_intervals
from fedshift.report.pools import Pool, Run
from fedshift.report.tables import Cell, Table

Rows = Callable[[Run], Sequence[Round]]
# Dots mark the evaluated rounds; with more of them than this they hide the line.
FEW = 30
SEVERAL = (
    "Lines are means over seeds, bands 95 % t-intervals of the thick ones (none below three seeds)."
)
SHORTER = "Seeds stopped after different rounds; lines end where the first of them did."


def metrics(run: Run) -> Sequence[Round]:
    """The rows of metrics.csv; for a run that is not complete, those that its events give."""
    return run.rounds


def times(run: Run) -> Sequence[Round]:
    """The seconds of every round, in the form of rows."""
    return [Round(t, {"seconds": s}) for t, s in sorted(run.seconds.items())]


def series_of(
    line: Pool, column: str, name: str = "", *, rows: Rows = metrics, thin: bool = False,
    look: Look | None = None,
) -> list[Series]:  # fmt: skip
    """A column by round: its mean over the seeds, with an interval; [] if it has no value.

    It is a list of at most one series, so that callers can join those of several lines.
    """
    # Rounds without this column are skipped instead of drawn as gaps: a run that is not complete
    # has them between its evaluations.
    runs = [
        {r.round: r.values[column] for r in rows(run) if column in r.values} for run in line.all
    ]
    common = sorted(set(runs[0]).intersection(*runs[1:]))
    values = [[run[t] for run in runs] for t in common]
    # Without a value of every seed the mean of a round would jump, so the curve has a gap there.
    each = [moments_of(of, column) for of in values]
    over = [m if m and m.n == len(runs) else None for m in each]
    if not any(over):
        return []
    x, name = tuple(map(float, common)), name or line.label
    y, *ends = with_intervals(over)
    # Thin lines (estimates) get no band, which would hide the main line's; times do not need one.
    low, high = ((), ()) if thin or column == "seconds" else ends
    return [Series(name, x, y, low, high, look=look, thin=thin, points=len(x) <= FEW)]


def round_chart(title: str, series: Sequence[Series], y: Axis) -> LineChart:
    """Lines over the rounds."""
    return LineChart(title, tuple(series), Axis("round", zero=True), y)


def words_on(caption: str, lines: Sequence[Pool]) -> str:
    """A caption, with sentences on bands and line ends if any line has several seeds."""
    several = any(len(line.all) > 1 for line in lines)
    ends = [{max((r.round for r in run.rounds), default=0) for run in p.all} for p in lines]
    shorter = any(len(rounds) > 1 for rounds in ends)
    return " ".join([caption, *[SEVERAL] * several, *[SHORTER] * shorter])


def of_numbers(line: Pool) -> bool:
    """Whether a line's runs are regressions, which have errors in place of accuracies."""
    return any("rmse" in r.values for run in line.all for r in run.rounds)


def accuracy(lines: Sequence[Pool]) -> str:
    """The section on accuracy or error by round; estimates are thin lines."""
    chart, errors = accuracy_chart(lines), any(map(of_numbers, lines))
    caption = (
        "Thick: on the test data. Thin, dotted: estimated from the clients' validation data alone."
    )
    parts = [figure(chart, words_on(caption, lines)), *_over_seeds(lines, errors)]
    return section("rounds", chart.title, *parts, *_tables(lines, errors))


def accuracy_chart(lines: Sequence[Pool]) -> LineChart:
    """Accuracy or error at the target by round, and its estimate as a thin line."""
    errors = any(map(of_numbers, lines))
    near = "estimated_rmse" if errors else "estimated_accuracy"
    series = [
        one
        for line in lines
        for one in (
            *series_of(line, _main(errors)),
            *series_of(line, near, f"{line.label}, estimated", thin=True),
        )
    ]
    axis = Axis("RMSE", zero=True) if errors else Axis("accuracy", percent=True)
    return round_chart(f"{'Error' if errors else 'Accuracy'} per round", series, axis)


def loss(lines: Sequence[Pool]) -> str:
    """The section on loss by round: in training, and on the test data if it was measured."""
    chart = loss_chart(lines)
    caption = "Thick: the clients' mean training loss under the weights."
    if any(one.thin for one in chart.series):
        caption += " Thin, dotted: on the test data."
    caption += " The tables by round have the numbers."
    return section("loss", chart.title, figure(chart, words_on(caption, lines)))


def loss_chart(lines: Sequence[Pool]) -> LineChart:
    """Training loss by round, and that at the target as a thin line."""
    series = [
        one
        for line in lines
        for one in (
            *series_of(line, "train_loss"),
            *series_of(line, "target_loss", f"{line.label}, at the target", thin=True),
        )
    ]
    return round_chart("Loss per round", series, Axis("loss"))


def time(lines: Sequence[Pool]) -> str:
    """The section on the seconds that a round takes."""
    timed = [line for line in lines if any(run.seconds for run in line.all)]
    if not timed:
        text = f"No times: no round was completed, or {EVENTS} is missing or damaged."
        return section("time", "Time per round", note(text))
    series = [one for line in timed for one in series_of(line, "seconds", rows=times)]
    chart = round_chart("Seconds per round", series, Axis("seconds", zero=True))
    caption = "Training and sums of one round, without its evaluation, on the machine of the run."
    if any(run.deployed for line in timed for run in line.all):
        caption = (
            "One round by the server's clock, from its first message to its sums, without its "
            "evaluation and without the wait for clients before round 1."
        )
    caption += " Lines are means over seeds." * any(len(line.all) > 1 for line in timed)
    numbers = table(_seconds(timed))
    return section("time", "Time per round", figure(chart, caption), numbers)


def _seconds(lines: Sequence[Pool]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for line in lines:
        seconds = [s for run in line.all for s in run.seconds.values()]
        total = statistics.fmean(sum(run.seconds.values()) for run in line.all if run.seconds)
        rows.append((line.label, len(seconds), statistics.median(seconds), max(seconds), total))
    head = ("Run", "Rounds timed", "Median, s", "Longest, s", "All rounds of a run, s")
    return Table(head, tuple(rows), ("", "d", ".3g", ".3g", ".4g"))


def _main(errors: bool) -> str:
    return "rmse" if errors else "target_accuracy"


def _is_share(column: str, run: Run) -> bool:
    """Whether a column has fractions. A user's metric called accuracy may be in percent already."""
    return ("accuracy" in column or column.endswith("_se")) and all(
        abs(r.values.get(column) or 0.0) <= 1 + 1e-9 for r in run.rounds
    )


def _over_seeds(lines: Sequence[Pool], errors: bool) -> list[str]:
    """A table of the main column by round, mean ± sd for each line; [] if all are single runs."""
    if all(len(line.all) == 1 for line in lines):
        return []
    column, spec = _main(errors), ".4g" if errors else ".1%"
    each = [[{r.round: r.values.get(column) for r in run.rounds} for run in p.all] for p in lines]
    rounds = sorted({t for runs in each for run in runs for t in run})
    rows = tuple(
        (t, *(mean_cell([run.get(t) for run in runs], spec) for runs in each)) for t in rounds
    )
    head = ("round", *(line.label for line in lines))
    name = f"{column.replace('_', ' ')}, mean ± standard deviation over seeds"
    numbers = Table(head, rows, ("d", *[spec] * len(lines)), name)
    return [fold(sampled(numbers, f"the {_source(lines)} of the runs"))]


def _source(lines: Sequence[Pool]) -> str:
    """The name of the file that has the rows; runs that are not complete have no metrics.csv."""
    begun = any(line.begun for line in lines)
    return METRICS if not begun else f"{METRICS} or, of runs that are not complete, {EVENTS}"


def _tables(lines: Sequence[Pool], errors: bool) -> list[str]:
    """The whole metrics.csv of every run, as tables."""
    shown = []
    for line in lines:
        for name, run in zip(line.names, line.all, strict=True):
            columns = dict.fromkeys(c for r in run.rounds for c in r.values)
            rows = tuple((r.round, *map(r.values.get, columns)) for r in run.rounds)
            shares = [not errors and _is_share(c, run) for c in columns]
            formats = tuple(".1%" if share else ".5g" for share in shares)
            head = tuple(c.replace("_", " ") for c in ("round", *columns))
            shown.append(Table(head, rows, ("d", *formats), name))
    return each_run(shown, len(lines), _source(lines))
