"""The report's main parts, each with a chart and a table of its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.headline import measured_on, target_words, validated_by
from fedshift.record.rounds import other_columns
from fedshift.record.summary import CurvePoint, corrected_by
from fedshift.report.charts import (
    Axis,
    BarChart,
    Bars,
    HeatMap,
    LineChart,
    Series,
)
from fedshift.report.folding import of_clients, pool_tables
from fedshift.report.layout import figure, fold, note, section, table
from fedshift.report.looks import GREY, Look
from fedshift.report.means import mean_column, moments_of, with_intervals
from fedshift.report.pools import Pool, firsts, runs_of
from fedshift.report.splits import (
    Split,
    classes_drawn,
    client_names,
    heading,
    left_out,
    looked_names,
    mass_columns,
    splits,
)
from fedshift.report.spread import spread_table
from fedshift.report.tables import Cell, Table, finite, from_columns


def results(lines: Sequence[Pool]) -> str:
    """The section with the table of methods."""
    forms = {c.form for run, _ in runs_of(lines) if (c := run.summary.corrected) is not None}
    header = (
        "Run", "Target accuracy", *["Corrected"] * bool(forms), "Macro F1", "Estimated accuracy",
        "± s.e.", "ESS", "ESS share", "Hull distance", "L1 distance", "λ", "Round",
    )  # fmt: skip
    rows = tuple(_result(run, name, bool(forms)) for run, name in runs_of(lines))
    accuracies = [".1%"] * (1 + bool(forms))
    formats = ("", *accuracies, ".3f", ".1%", ".1%", ".0f", ".1%", ".4f", ".4f", ".4g", "d")
    targets = [target_words(run.fit, run.config) for run, _ in runs_of(lines)]
    text = (
        f"Target accuracy is measured on {measured_on(targets)}, and so is macro F1, "
        "the mean of F1 over the labels that occur there. The estimate needs "
        "none: it is the clients' pooled recall per class, weighted by the target's label "
        "distribution. ESS, the effective sample size, is the number of examples that equally "
        "weighted data would need for the same variance. Hull distance is how far the target is "
        "from every possible mixture of the clients; the L1 distance is how far it is from the "
        "mixture that this run trained on (0 equal, 2 disjoint)."
    )
    text += " ".join(["", *corrected_by(forms)])
    doubtful = [name for run, name in runs_of(lines) if run.summary.certified is False]
    if doubtful:
        text += f" The weights of {', '.join(doubtful)} are not certified optimal."
    text += " " + validated_by(run.deployed for run, _ in runs_of(lines))
    text += _cohort_note(*firsts(lines))
    numbers = pool_tables(Table(header, rows, formats), lines)
    return section("results", "Results", *numbers, note(text))


def other_metrics(lines: Sequence[Pool]) -> str:
    """The section with the user's own metrics of the kept round; "" if no run has any."""
    runs = [run for run, _ in runs_of(lines)]
    columns = (other_columns(run.rounds, run.summary.final.others) for run in runs)
    names = list(dict.fromkeys(name for row in columns for name in row))
    if not names:
        return ""
    rows = tuple(
        (label, *(finite(run.summary.final.others.get(name)) for name in names))
        for run, label in runs_of(lines)
    )
    numbers = Table(("Run", *names), rows, ("", *([".4g"] * len(names))))
    name, text = "Own metrics", "Measured by the user's own functions on the test data."
    if any(run.summary.kind for run in runs):
        name = "Metrics"
        text = (
            "On the test data; what begins with estimated or source is of the clients' "
            "validation data alone. The accuracy of labels is the mean over all of them."
        )
    return section("metrics", name, *pool_tables(numbers, lines), note(text))


def label_shift(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on label shift: a heat map for each set of clients, with the target last."""
    parts = []
    for split in splits(runs, labels):
        columns, others = classes_drawn(split.runs[0])
        words = " ".join(filter(None, (left_out(split, len(columns)), others)))
        drawing = figure(_label_map(split), words)
        parts += [heading(split, runs), drawing, _counts_table(split)]
    everywhere = all(run.summary.serving for run in runs)
    mixture = "their test examples together" if everywhere else "the target"
    return section("labels", f"Label distribution of the clients and of {mixture}", *parts)


def weights(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on the clients' weights, beside FedAvg's."""
    parts = []
    for split in splits(runs, labels):
        equal = [b for r, b in zip(split.runs, split.labels, strict=True) if not weighs(r)]
        note_equal = f"{', '.join(equal)}: equal to n / N. " if equal else ""
        names, sizes = client_names(split.runs[0]), [c.n for c in split.runs[0].clients]
        numbers = from_columns("Client", names, _weights(split), ".2%", [("n", sizes, ".0f")])
        drawing = figure(weights_chart(split), note_equal + left_out(split))
        parts += [heading(split, runs), drawing, fold(of_clients(numbers, split))]
    means = _cohort_note(runs, labels).strip()
    return section("weights", "Weights", *parts, *([note(means)] if means else []))


def weights_chart(split: Split) -> BarChart:
    """A chart of the clients' weights, with n / N in grey."""
    names, drawn = client_names(split.runs[0]), split.drawn()
    bars = [
        Bars(name, tuple(column[i] for i in drawn), look=None if k else Look(GREY))
        for k, (name, column) in enumerate(_weights(split))
    ]
    title = f"Weight of each client in the average ({split.name})"
    axis = Axis("weight", percent=True)
    return BarChart(title, tuple(names[i] for i in drawn), tuple(bars), axis)


def _weights(split: Split) -> list[tuple[str, Sequence[float]]]:
    """(name, weights): n / N first, then each run's weights if they differ from it."""
    weighed = zip(split.labels, split.runs, strict=True)
    base = ("n / N", split.runs[0].summary.fedavg_weights)
    return [base, *((b, r.summary.weights) for b, r in weighed if weighs(r))]


def curves(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The section on ESS against distance: curves of the sets of clients, points of the runs."""
    parts = []
    for name, curve in _attainable(runs, labels):
        # All grid points with an ESS below that of lambda = 0 are the same point.
        distinct = {(round(p.ess_fraction, 9), round(p.l1, 9)): p for p in curve}.values()
        rows = tuple((finite(p.lam), p.ess_fraction, p.distance, p.l1) for p in distinct)
        head = ("λ", "ESS share", "L2 distance", "L1 distance")
        parts.append(table(Table(head, rows, (".4g", ".1%", ".6f", ".6f"), name)))
    caption = (
        "Down is a mixture closer to the target, right is less variance. The large markers are "
        "the weights that the runs used."
    ) + _cohort_note(runs, labels)
    drawing = figure(curve_chart(runs, labels), caption)
    return section("ess", "What closeness to the target costs", drawing, *parts)


def _attainable(
    runs: Sequence[RunResult], labels: Sequence[str]
) -> list[tuple[str, tuple[CurvePoint, ...]]]:
    """(name, curve) of each set of clients: the curve depends on clients and target alone."""
    several = len(groups := splits(runs, labels)) > 1
    curves = ((s, next((r.summary.curve for r in s.runs if r.summary.curve), ())) for s in groups)
    return [("attainable" + f" ({s.name})" * several, curve) for s, curve in curves if curve]


def curve_chart(runs: Sequence[RunResult], labels: Sequence[str]) -> LineChart:
    """Distance to the target against ESS: what is attainable in grey, what runs chose as points."""
    series = []
    for name, curve in _attainable(runs, labels):
        ordered = sorted(curve, key=lambda p: p.ess_fraction)
        x, y = tuple(p.ess_fraction for p in ordered), tuple(p.l1 for p in ordered)
        series.append(Series(name, x, y, look=Look(GREY), points=True))
    for run, label in zip(runs, labels, strict=True):
        if run.summary.ess_fraction is not None and run.summary.l1_distance is not None:
            point = ((run.summary.ess_fraction,), (run.summary.l1_distance,))
            series.append(Series(f"chosen: {label}", *point, line=False))
    title = "Effective sample size against the distance to the target"
    across = Axis("effective sample size, share of all examples", percent=True)
    return LineChart(title, tuple(series), across, Axis("L1 distance", zero=True))


def recall_chart(title: str, lines: Sequence[Pool]) -> BarChart:
    """A chart of recall per class: for each line the mean over its seeds, with an interval."""
    classes, bars = lines[0].first.summary.classes, []
    columns, _ = classes_drawn(lines[0].first)
    for line in lines:
        each = [run.summary.final.target_recall for run in line.runs]
        over = [moments_of([of[k] for of in each], "recall") for k in columns]
        bars.append(Bars(line.label, *with_intervals(over)))
    names = tuple(classes[k] for k in columns)
    return BarChart(title, names, tuple(bars), Axis("recall", percent=True))


def per_class(lines: Sequence[Pool]) -> str:
    """The section on recall per class, beside each class's mass in the target."""
    runs = [run for run, _ in runs_of(lines)]
    drawing = recall_chart("Accuracy per class on the test data", lines)
    columns: list[tuple[str, Sequence[Cell]]] = []
    for line in lines:
        ends = [run.summary.final for run in line.runs]
        columns.append((line.label, mean_column([end.target_recall for end in ends])))
        near = mean_column([end.recall_estimate for end in ends])
        columns.append((f"{line.label}, estimated", near))
    classes, masses = runs[0].summary.classes, mass_columns(runs, "Target mass")
    numbers = from_columns("Class", classes, columns, ".1%", masses)
    caption = (
        "– marks a class without test data. Estimates come from the clients' validation data alone."
    )
    caption = " ".join(filter(None, (caption, classes_drawn(runs[0])[1])))
    return section("classes", "Accuracy per class", figure(drawing, caption), fold(numbers))


def client_spread(lines: Sequence[Pool]) -> str:
    """The section on differences between clients: the worst, bottom decile, sd, Gini, and all."""
    text = (
        "Accuracy of the final model on the validation data of each of the task's clients (for the "
        "oracle too, which trains on others). Bottom decile: mean of the lowest tenth of the "
        "clients. Gini: 0 when all clients are served alike."
    )
    spreads = spread_table(
        (name, client_names(run), run.summary.final.client_accuracy) for run, name in runs_of(lines)
    )
    parts = [*pool_tables(spreads, lines), note(text)]
    runs, labels = firsts(lines)
    for split in splits(runs, labels):
        columns = [
            (lines[i].label, mean_column([r.summary.final.client_accuracy for r in lines[i].alike]))
            for i in split.places
        ]
        sizes = [c.n_validation for c in split.runs[0].clients]
        size_column = [("validation examples", sizes, ".0f")]
        numbers = from_columns("Client", client_names(split.runs[0]), columns, ".1%", size_column)
        parts += [heading(split, runs), fold(of_clients(numbers, split))]
    return section("clients", "The clients", *parts)


def _result(run: RunResult, label: str, moved: bool) -> tuple[Cell, ...]:
    s = run.summary
    se = finite(s.final.estimated_se)
    accuracies = (s.final.target_accuracy, *[s.final.target_accuracy_corrected] * moved)
    final = (*accuracies, s.final.target_macro_f1, s.final.estimated_accuracy, se)
    ess = (s.ess, s.ess_fraction, s.hull_distance, s.l1_distance, finite(s.lam))
    return (label, *final, *ess, s.final.round)


def _label_map(split: Split) -> HeatMap:
    s, names = split.runs[0].summary, looked_names(split.runs[0])
    columns, _ = classes_drawn(split.runs[0])
    drawn, shares, notes = split.drawn(len(columns)), [], []
    for i in drawn:
        counts, n = s.label_counts[i], sum(s.label_counts[i]) or 1.0
        shares.append(tuple(counts[k] / n for k in columns))
        cells = ((s.classes[k], counts[k]) for k in columns)
        notes.append(tuple(f"{names[i]}, {c}: {v:g} examples, {v / n:.1%}" for c, v in cells))
    last = _target_name(split)
    notes.append(tuple(f"{last}, {s.classes[k]}: {s.target[k]:.1%}" for k in columns))
    rows = (*(names[i] for i in drawn), last)
    title = f"Share of each label per client, and of the {last} ({split.name})"
    values = (*shares, tuple(s.target[k] for k in columns))
    return HeatMap(title, rows, tuple(s.classes[k] for k in columns), values, tuple(notes))


def _counts_table(split: Split) -> str:
    run = split.runs[0]
    s = run.summary
    rows: list[tuple[Cell, ...]] = [
        (name, *counts) for name, counts in zip(client_names(run), s.label_counts, strict=True)
    ]
    rows.append((_target_name(split), *(f"{t:.1%}" for t in s.target)))
    formats = ("", *([".0f"] * len(s.classes)))
    return fold(of_clients(Table(("Client", *s.classes), tuple(rows), formats), split))


def weighs(run: RunResult) -> bool:
    """Whether the run's weights differ from n / N."""
    pairs = zip(run.summary.weights, run.summary.fedavg_weights, strict=True)
    return max(abs(a - b) for a, b in pairs) > 1e-12


def _target_name(split: Split) -> str:
    return "tests of all" if split.runs[0].summary.serving else "target"


def _cohort_note(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """Words on ESS, distances and weights of runs that draw cohorts; "" without such runs."""
    sampling = [
        f"{label} ({s.cohorts.clients} of {len(s.weights)} clients a round, {s.cohorts.rounds} "
        "rounds)"
        for s, label in zip((r.summary for r in runs), labels, strict=True)
        if s.cohorts is not None
    ]
    if not sampling:
        return ""
    return (
        f" Every round of {', '.join(sampling)} draws a cohort and weighs it anew: ESS, its share "
        "(of the cohort's examples), L1 distance and each client's weight are means over the "
        "rounds that were played; a client that is not drawn has weight 0."
    )
