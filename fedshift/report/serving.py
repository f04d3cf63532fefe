"""The report's parts on runs whose clients serve models of their own."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import SERVED, RunResult
from fedshift.record.rounds import Round
from fedshift.record.summary import Serving
from fedshift.report.by_round import round_chart, series_of, words_on
from fedshift.report.charts import ACCURACY, Axis, HeatMap, LineChart
from fedshift.report.folding import each_run, of_clients
from fedshift.report.layout import figure, fold, note, section, table
from fedshift.report.looks import Look
from fedshift.report.means import mean_cell, mean_column, moments_of
from fedshift.report.pools import Pool, Run, runs_of
from fedshift.report.sections import recall_chart
from fedshift.report.splits import (
    Split,
    by_client,
    classes_drawn,
    client_names,
    heading,
    left_out,
    looked_names,
    looks,
    mass_columns,
    percent,
    run_heading,
    serving_runs,
    splits,
)
from fedshift.report.spread import spread_table
from fedshift.report.tables import MISSING, Cell, Table, from_columns
from fedshift.report.ways import WAYS, over_rounds

# (name, column of served.csv, what it is)
CURVES = (
    (
        "system",
        "system_accuracy",
        "The system of all clients, on everybody's test examples: routed by the largest posterior "
        "where there is a router, else by vote.",
    ),
    (
        "average of own models",
        "average_accuracy",
        "Own models on their own client's test examples, weighted by training sizes.",
    ),
    ("global model", "global_accuracy", "The server's model, where it has a complete one."),
    (
        "client found by the router",
        "router_accuracy",
        "How often the router finds the client that a test example comes from.",
    ),
)


def answers(lines: Sequence[Pool]) -> str:
    """The section with the accuracy of every way to answer a query, by line."""
    lasts = [run.summary.last or {} for run, _ in runs_of(lines)]
    ways = [w for w in WAYS if any(last.get(w.key) is not None for last in lasts)]
    columns = [(line.label, tuple(_cell(line, w.key) for w in ways)) for line in lines]
    shown = from_columns("How a query is answered", [w.label for w in ways], columns, ".1%")
    rounds = over_rounds([int(_number(last["rounds"])) for last in lasts])
    single = rounds == "last round"
    over = "in the last round" if single else f"mean of the {rounds} that were evaluated"
    if any(len(line.runs) > 1 for line in lines):
        over += ", ± the deviation over seeds"
    elif not single:
        over += ", ± the deviation over these rounds"
    text = (
        f"Share of right answers, {over}. "
        "Own models answer their own client's test examples, weighted by training sizes; all else "
        "is measured on all clients' test examples together. Oracle: the query's origin is known."
    )
    if any(w.key.startswith(("refitted", "moment")) for w in ways):
        text += (
            " Refitted and moment routers are of the last round alone: the router's last layer, "
            "fitted once more."
        )
    verdicts = [note(sentence) for sentence in [verdict(lines)] if sentence]
    return section("answers", "How queries are answered", *verdicts, table(shown), note(text))


def curves(lines: Sequence[Pool]) -> str:
    """The section on accuracies by round.

    A single line has a chart with all its accuracies. Several have a chart for each accuracy.
    """
    parts = []
    if len(lines) == 1:
        series = [
            one
            for i, (name, key, _) in enumerate(CURVES, start=1)
            for one in series_of(lines[0], key, name, rows=_served, look=Look(i))
        ]
        chart = round_chart("Accuracy per round", series, Axis("accuracy", percent=True))
        parts.append(figure(chart, words_on("On the clients' test examples.", lines)))
    for name, key, meaning in CURVES if len(lines) > 1 else ():
        chart = served_chart(lines, key, name)
        if chart.series:
            parts.append(figure(chart, words_on(meaning, lines)))
    tables = [_rounds(run, name) for run, name in runs_of(lines)]
    return section("served", "Accuracy per round", *parts, *each_run(tables, len(lines), SERVED))


def served_chart(lines: Sequence[Pool], key: str, name: str) -> LineChart:
    """A chart of one accuracy by round, with a curve for each line."""
    series = [one for line in lines for one in series_of(line, key, rows=_served)]
    return round_chart(f"Accuracy per round: {name}", series, Axis(name, percent=True))


def _served(run: Run) -> Sequence[Round]:
    return run.served if isinstance(run, RunResult) else ()


def served_models(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on each client's own model, by class, on its own test examples."""
    parts = []
    for run, label, serving in serving_runs(runs, labels):
        alone, (columns, others) = Split((run,), (label,), (0,)), classes_drawn(run)
        words = " ".join(filter(None, (left_out(alone, len(columns)), others)))
        numbers = by_client(run, run.summary.classes, serving.class_accuracy)
        drawing = figure(own_map(run, label, serving), words)
        parts += [run_heading(runs, label), drawing, fold(of_clients(numbers, alone))]
    text = "Of the last round. An empty cell: the client has no test examples of this class."
    return section("own", "Own models on their own client's classes", note(text), *parts)


def own_map(run: RunResult, label: str, serving: Serving) -> HeatMap:
    """Accuracy of each client's own model by class."""
    names, classes = looked_names(run), run.summary.classes
    columns, _ = classes_drawn(run)
    drawn = Split((run,), (label,), (0,)).drawn(len(columns))
    rows = tuple(tuple(serving.class_accuracy[i][k] for k in columns) for i in drawn)
    notes = tuple(
        tuple(f"{names[i]}, {classes[k]}: {percent(v)}" for k, v in zip(columns, row, strict=True))
        for i, row in zip(drawn, rows, strict=True)
    )
    title = f"Accuracy of each client's own model by class ({label})"
    shown = tuple(classes[k] for k in columns)
    return HeatMap(title, tuple(names[i] for i in drawn), shown, rows, notes, ACCURACY)


_OWN = " Where clients test at their sites: each client's own model on its own test examples."
_SYSTEM = (
    " The system's answers: routed by the largest posterior where there is a router, else by vote."
)


def per_class(lines: Sequence[Pool]) -> str:
    """The section on the system's recall per class, beside the class's share of test examples."""
    runs = [run for run, _ in runs_of(lines)]
    classes = runs[0].summary.classes
    drawing = recall_chart("Accuracy per class on all clients' test examples", lines)
    columns = [
        (line.label, mean_column([run.summary.final.target_recall for run in line.runs]))
        for line in lines
    ]
    numbers = from_columns("Class", classes, columns, ".1%", mass_columns(runs, "Share of tests"))
    # If models stay at their sites they cannot be asked together: the system has no answers then.
    alone = {(run.summary.last or {}).get("system_accuracy", 0.0) is None for run in runs}
    caption = f"After the last round.{_OWN * (True in alone)}{_SYSTEM * (False in alone)}"
    return section("system", "Accuracy per class", figure(drawing, caption), fold(numbers))


def clients(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on differences between clients, each with its own model."""
    served = [(r, b, s.client_accuracy) for r, b, s in serving_runs(runs, labels)]
    measured = [(run, label, values) for run, label, values in served if values is not None]
    if not measured:
        return ""
    spreads = spread_table((label, client_names(run), values) for run, label, values in measured)
    text = (
        "Each client's own model on its own test examples, after the last round; all clients count "
        "alike. Bottom decile: mean of the lowest tenth of the clients. Gini: 0 when all clients "
        "are served alike."
    )
    parts = [table(spreads), note(text)]
    for split in splits([run for run, _, _ in measured], [label for _, label, _ in measured]):
        parts += [heading(split, runs), fold(of_clients(_client_table(split), split))]
    return section("own-clients", "The clients", *parts)


def _client_table(split: Split) -> Table:
    """By client, its own model's accuracy and, with a router, how often the router finds it."""
    columns: list[tuple[str, Sequence[Cell]]] = []
    for _, label, serving in serving_runs(split.runs, split.labels):
        columns.append((label, serving.client_accuracy or ()))
        if serving.router is not None:
            # The diagonal has the shares of a client's queries that were sent to itself.
            hits = tuple(row[i] for i, row in enumerate(serving.router.sent))
            columns.append((f"{label}, found by the router", hits))
    first = split.runs[0]
    first_columns: list[tuple[str, Sequence[Cell], str]] = []
    first_columns += [("Look or site", looks(first), "")] if looks(first) else []
    first_columns.append(("Training examples", tuple(c.n for c in first.clients), ".0f"))
    return from_columns("Client", client_names(first), columns, ".1%", first_columns)


def _rounds(run: RunResult, label: str) -> Table:
    """The whole of served.csv, with the training loss."""
    losses = {r.round: r.values["train_loss"] for r in run.rounds}
    columns = tuple(run.served[0].values) if run.served else ()
    # Empty columns are left out: a method without a router would have five.
    present = [c for c in columns if any(r.values[c] is not None for r in run.served)]
    rows = tuple(
        (r.round, losses.get(r.round), *(r.values[c] for c in present)) for r in run.served
    )
    head = ("round", "train loss", *(c.replace("_", " ") for c in present))
    return Table(head, rows, ("d", ".5g", *[".1%"] * len(present)), label)


def _cell(line: Pool, key: str) -> Cell:
    """Mean ± deviation over the seeds; for a single run, over its last rounds."""
    if len(line.runs) > 1:
        return mean_cell([_number((run.summary.last or {}).get(key)) for run in line.runs], ".1%")
    last = line.first.summary.last or {}
    value, sd = last.get(key), last.get(f"{key}_sd")
    if value is None:
        return MISSING
    several = sd is not None and _number(last["rounds"]) > 1
    return (
        f"{percent(_number(value))} ± {percent(_number(sd))}"
        if several
        else percent(_number(value))
    )


def _number(value: Cell) -> float:
    return float("nan") if value is None else float(value)


def verdict(lines: Sequence[Pool]) -> str:
    """A sentence on each line with a router, compared with the best global model; "" without both.

    The difference is between the runs on the page, and says nothing about other seeds.
    """
    shared = _measured(lines, "global_accuracy")
    # A line alone, or without a global model on the page, has nothing to be compared with.
    if len(lines) < 2 or not shared:
        return ""
    best, name = max(shared)
    parts = []
    for share, label in _measured(lines, "routed_posterior"):
        word = "beats" if share > best else "does not beat"
        parts.append(
            f"Routing ({label}) {word} one global model ({name}) here: {share:.1%} against "
            f"{best:.1%}, {100 * (share - best):+.1f} points."
        )
    return " ".join(parts)


def _measured(lines: Sequence[Pool], key: str) -> list[tuple[float, str]]:
    """(mean of a metric over the seeds, label) of the lines that have it."""
    each = [
        (moments_of([_number((run.summary.last or {}).get(key)) for run in line.runs], key), line)
        for line in lines
    ]
    return [(over.mean, line.label) for over, line in each if over is not None]
