"""The part of the report on which class is taken for which, on test data of the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.report.charts import SENT, HeatMap
from fedshift.report.folding import each_run
from fedshift.report.layout import figure, note, section
from fedshift.report.pools import Pool
from fedshift.report.tables import Table

# Classes of a drawing: more are too small to read. Pairs of a table: the largest ones.
MOST_CLASSES, MOST_PAIRS = 40, 30
Counts = dict[tuple[int, int], int]


def confusion(lines: Sequence[Pool]) -> str:
    """A heat map of shares per line, over the examples of all its seeds, and what is mistaken."""
    served = all(line.first.summary.serving for line in lines)
    heading = f"Confusion {'on the tests of all clients' if served else 'at the target'}"
    counted = [(line, counts) for line in lines if (counts := _counts(line.runs))]
    if not counted:
        text = "Which class is taken for which: run folders of this version have it, these do not."
        return section("confusion", heading, note(text))
    classes = lines[0].first.summary.classes
    parts = []
    for line, counts in counted:
        parts.append(figure(_map(line.label, counts, classes), _words(line, counts, classes)))
    tables = [_mistakes(line.label, counts, classes) for line, counts in counted]
    parts += each_run(tables, len(tables), "confusion.csv")
    missing = [line.label for line in lines if line not in [one for one, _ in counted]]
    if missing:
        parts.append(note(f"Folders of older versions lack it: {', '.join(missing)}."))
    return section("confusion", heading, *parts)


def _counts(runs: Sequence[RunResult]) -> Counts:
    """The sum over runs; empty where one of them has none."""
    total = Counter[tuple[int, int]]()
    for run in runs:
        if not run.confusion:
            return {}
        total.update(run.confusion)
    return dict(total)


def _shown(counts: Counts) -> list[int]:
    """The classes with the most examples, true or predicted, in their own order."""
    sizes = Counter[int]()
    for (true, given), n in counts.items():
        sizes[true] += n
        sizes[given] += n
    return sorted(k for k, _ in sizes.most_common(MOST_CLASSES))


def _map(label: str, counts: Counts, classes: Sequence[str]) -> HeatMap:
    shown = _shown(counts)
    totals = Counter[int]()
    for (true, _), n in counts.items():
        totals[true] += n
    values = [[counts.get((i, j), 0) / max(1, totals[i]) for j in shown] for i in shown]
    notes = [
        [f"{classes[i]} taken for {classes[j]}: {counts.get((i, j), 0)}" for j in shown]
        for i in shown
    ]
    names = tuple(classes[i] for i in shown)
    title = f"What each class is taken for ({label})"
    return HeatMap(title, names, names, tuple(map(tuple, values)), tuple(map(tuple, notes)), SENT)


def _words(line: Pool, counts: Counts, classes: Sequence[str]) -> str:
    text = f"{line.label}. Rows: the true class. Columns: what the model says."
    if len(line.runs) > 1:
        text += f" The examples of all {len(line.runs)} seeds together."
    left = len({k for pair in counts for k in pair}) - len(_shown(counts))
    return text + (f" The {MOST_CLASSES} largest classes; {left} more are left out." * (left > 0))


def _mistakes(label: str, counts: Counts, classes: Sequence[str]) -> Table:
    """The most frequent mistakes."""
    totals = Counter[int]()
    for (true, _), n in counts.items():
        totals[true] += n
    wrong = sorted(((n, -i, -j) for (i, j), n in counts.items() if i != j), reverse=True)
    rows = tuple((classes[-i], classes[-j], n, n / totals[-i]) for n, i, j in wrong[:MOST_PAIRS])
    more = f", the {MOST_PAIRS} most frequent of {len(wrong)}" * (len(wrong) > MOST_PAIRS)
    head = ("True class", "Taken for", "Examples", "Share of the class")
    return Table(head, rows, ("", "", "d", ".1%"), f"{label}: mistakes{more}")
