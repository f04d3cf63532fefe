"""The parts of the report on runs whose clients serve models of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import Last, Serving
from fedshift.report.charts import ACCURACY, Axis, HeatMap, LineChart, Series
from fedshift.report.layout import figure, fold, note, section, table
from fedshift.report.looks import Look
from fedshift.report.sections import recall_chart
from fedshift.report.splits import (
    Split,
    by_client,
    by_round,
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


def answers(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """Every way to answer a query that some run has, run by run."""
    lasts = [r.summary.last or {} for r in runs]
    ways = [w for w in WAYS if any(last.get(w.key) is not None for last in lasts)]
    columns = [
        (label, tuple(_cell(last, w.key) for w in ways))
        for label, last in zip(labels, lasts, strict=True)
    ]
    shown = from_columns("How a query is answered", [w.label for w in ways], columns, ".1%")
    rounds = over_rounds([int(_number(last["rounds"])) for last in lasts])
    single = rounds == "last round"
    over = "in the last round" if single else f"mean of the {rounds} that were evaluated"
    text = (
        f"Share of right answers, {over}{'' if single else ', ± the deviation over these rounds'}. "
        "Own models answer their own client's test examples, weighted by training sizes; all else "
        "is measured on all clients' test examples together. Oracle: the query's origin is known."
    )
    if any(w.key.startswith(("refitted", "moment")) for w in ways):
        text += (
            " Refitted and moment routers are of the last round alone: the router's last layer, "
            "fitted once more."
        )
    verdicts = [note(sentence) for sentence in [verdict(runs, labels)] if sentence]
    return section("answers", "How queries are answered", *verdicts, table(shown), note(text))


def curves(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """One run: its accuracies by round. Several: a chart per accuracy with a line per run."""
    parts = []
    if len(runs) == 1:
        series = [
            by_round(runs[0].served, name, key, look=Look(i))
            for i, (name, key, _) in enumerate(CURVES, start=1)
        ]
        chart = _line_chart("Accuracy per round", series, "accuracy")
        parts.append(figure(chart, "On the clients' test examples."))
    for name, key, meaning in CURVES if len(runs) > 1 else ():
        chart = served_chart(runs, labels, key, name)
        if chart.series:
            parts.append(figure(chart, meaning))
    parts += [fold(_rounds(r, label)) for r, label in zip(runs, labels, strict=True)]
    return section("served", "Accuracy per round", *parts)


def served_chart(
    runs: Sequence[RunResult], labels: Sequence[str], key: str, name: str
) -> LineChart:
    """One accuracy by round, a line per run."""
    series = [by_round(r.served, b, key) for r, b in zip(runs, labels, strict=True)]
    return _line_chart(f"Accuracy per round: {name}", series, name)


def _line_chart(title: str, series: Sequence[Series], what: str) -> LineChart:
    measured = tuple(s for s in series if any(v is not None for v in s.y))
    return LineChart(title, measured, Axis("round", zero=True), Axis(what, percent=True))


def served_models(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """How well each client's own model does on its own test examples, class by class."""
    parts = []
    for run, label, serving in serving_runs(runs, labels):
        drawing = figure(own_map(run, label, serving), left_out(Split((run,), (label,), (0,))))
        numbers = by_client(run, run.summary.classes, serving.class_accuracy)
        parts += [run_heading(runs, label), drawing, fold(numbers)]
    text = "Of the last round. An empty cell: the client has no test examples of this class."
    return section("own", "Own models on their own client's classes", note(text), *parts)


def own_map(run: RunResult, label: str, serving: Serving) -> HeatMap:
    """Accuracy of each client's own model by class."""
    drawn, names = Split((run,), (label,), (0,)).drawn(), looked_names(run)
    classes = run.summary.classes
    rows = tuple(serving.class_accuracy[i] for i in drawn)
    notes = tuple(
        tuple(f"{names[i]}, {c}: {percent(v)}" for c, v in zip(classes, row, strict=True))
        for i, row in zip(drawn, rows, strict=True)
    )
    title = f"Accuracy of each client's own model by class ({label})"
    return HeatMap(title, tuple(names[i] for i in drawn), classes, rows, notes, ACCURACY)


def per_class(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The system's recall per class on all test examples, beside the class's share of them."""
    classes = runs[0].summary.classes
    pairs = list(zip(runs, labels, strict=True))
    drawing = recall_chart("Accuracy per class on all clients' test examples", runs, labels)
    columns = [(label, r.summary.final.target_recall) for r, label in pairs]
    numbers = from_columns("Class", classes, columns, ".1%", mass_columns(runs, "Share of tests"))
    caption = (
        "The system's answers after the last round: routed by the largest posterior where there "
        "is a router, else by vote."
    )
    return section("system", "Accuracy per class", figure(drawing, caption), fold(numbers))


def clients(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """Worst client, bottom decile, sd and Gini of own models, and every client's accuracy."""
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
        parts += [heading(split, runs), fold(_client_table(split))]
    return section("own-clients", "The clients", *parts)


def _client_table(split: Split) -> Table:
    """Accuracy of own models and, where there is a router, how often the client is found."""
    columns: list[tuple[str, Sequence[Cell]]] = []
    for _, label, serving in serving_runs(split.runs, split.labels):
        columns.append((label, serving.client_accuracy or ()))
        if serving.router is not None:
            # The diagonal: a client's queries that were sent to itself.
            hits = tuple(row[i] for i, row in enumerate(serving.router.sent))
            columns.append((f"{label}, found by the router", hits))
    first = split.runs[0]
    first_columns: list[tuple[str, Sequence[Cell], str]] = []
    first_columns += [("Look or site", looks(first), "")] if looks(first) else []
    first_columns.append(("Training examples", tuple(c.n for c in first.clients), ".0f"))
    return from_columns("Client", client_names(first), columns, ".1%", first_columns)


def _rounds(run: RunResult, label: str) -> Table:
    """All of served.csv, with the training loss."""
    losses = {r.round: r.values["train_loss"] for r in run.rounds}
    columns = tuple(run.served[0].values) if run.served else ()
    # A method without a router would have five empty columns.
    present = [c for c in columns if any(r.values[c] is not None for r in run.served)]
    rows = tuple(
        (r.round, losses.get(r.round), *(r.values[c] for c in present)) for r in run.served
    )
    head = ("round", "train loss", *(c.replace("_", " ") for c in present))
    return Table(head, rows, ("d", ".5g", *[".1%"] * len(present)), label)


def _cell(last: Mapping[str, Cell], key: str) -> str:
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


def verdict(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """One sentence per run with a router against the best global model; "" without both.

    The difference is between single runs and says nothing about other seeds.
    """
    lasts = [(r.summary.last or {}, label) for r, label in zip(runs, labels, strict=True)]
    shared = _measured(lasts, "global_accuracy")
    # Alone, or without a global model, a run has nothing to be compared with.
    if len(runs) < 2 or not shared:
        return ""
    best, name = max(shared)
    parts = []
    for share, label in _measured(lasts, "routed_posterior"):
        word = "beats" if share > best else "does not beat"
        parts.append(
            f"Routing ({label}) {word} one global model ({name}) here: {share:.1%} against "
            f"{best:.1%}, {100 * (share - best):+.1f} points."
        )
    return " ".join(parts)


def _measured(lasts: Sequence[tuple[Last, str]], key: str) -> list[tuple[float, str]]:
    return [(float(v), label) for last, label in lasts if (v := last.get(key)) is not None]
