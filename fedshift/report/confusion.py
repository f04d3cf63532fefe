"""The report's part on confusion: which class is taken for which, on the target's test data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fedshift.record.folder import RunResult
from fedshift.report.charts import SENT, HeatMap
from fedshift.report.layout import figure, fold, note, section
from fedshift.report.pools import Pool
from fedshift.report.tables import Table

# Classes in a chart, since more are too small to read; and rows in the table of mistakes.
MOST_CLASSES, MOST_MISTAKES = 40, 10
Counts = Mapping[tuple[int, int], int]


def confusion(lines: Sequence[Pool]) -> str:
    """A heat map for each line, over the examples of all its seeds, and the commonest mistakes."""
    tests = {line.label: _tests(line) for line in lines}
    same = len(set(tests.values())) == 1
    heading = f"Confusion {_tests(lines[0])}" if same else "Confusion"
    counted = [(line, counts) for line in lines if (counts := _counts(line.runs))]
    missing = [line.label for line in lines if line not in [one for one, _ in counted]]
    parts = []
    if missing:
        why = (
            "runs of more than 1,000 classes, or whose clients test at their sites, do not count it"
        )
        parts.append(note(f"Not in the folders of {', '.join(missing)}: {why}."))
    # The same rows and columns for all lines.
    shown, left = _shown([counts for _, counts in counted])
    classes = lines[0].first.summary.classes
    for line, counts in counted:
        text = "Rows: the true class. Columns: what the model says."
        text += f" Counted {tests[line.label]}." * (not same)
        if len(line.runs) > 1:
            text += f" The examples of all {len(line.runs)} seeds together."
        text += f" The {len(shown)} largest classes; {left} more are left out." * (left > 0)
        parts.append(figure(_map(line.label, counts, classes, shown), f"{line.label}. {text}"))
    if counted:
        parts.append(fold(_mistakes(counted, classes)))
    return section("confusion", heading, *parts)


def _tests(line: Pool) -> str:
    """Words for whose test examples are counted."""
    return "on the tests of all clients" if line.first.summary.serving else "at the target"


def _counts(runs: Sequence[RunResult]) -> Counts:
    """The sum over runs; {} if any of them has no counts."""
    total = Counter[tuple[int, int]]()
    for run in runs:
        if not run.confusion:
            return {}
        total.update(run.confusion)
    return total


def _totals(counts: Counts) -> Counter[int]:
    """Test examples by class."""
    totals = Counter[int]()
    for (true, _), n in counts.items():
        totals[true] += n
    return totals


def _shown(each: Sequence[Counts]) -> tuple[list[int], int]:
    """(the classes with most examples, true or predicted, in order; how many are left out)."""
    sizes = Counter[int]()
    for counts in each:
        for pair, n in counts.items():
            sizes.update(dict.fromkeys(pair, n))
    shown = sorted(k for k, _ in sizes.most_common(MOST_CLASSES))
    return shown, len(sizes) - len(shown)


def _map(label: str, counts: Counts, classes: Sequence[str], shown: Sequence[int]) -> HeatMap:
    """A row for each true class with test examples: the shares of the model's answers."""
    totals = _totals(counts)
    rows = [i for i in shown if totals[i]]
    values = tuple(tuple(counts.get((i, j), 0) / totals[i] for j in shown) for i in rows)
    notes = tuple(
        tuple(f"{classes[i]} taken for {classes[j]}: {counts.get((i, j), 0)}" for j in shown)
        for i in rows
    )
    title = f"What each class is taken for ({label})"
    names, columns = (tuple(classes[i] for i in of) for of in (rows, shown))
    return HeatMap(title, names, columns, values, notes, SENT)


def _mistakes(counted: Sequence[tuple[Pool, Counts]], classes: Sequence[str]) -> Table:
    """The pairs of classes confused most often in any line, as shares of the true class."""
    worst = Counter[tuple[int, int]]()
    for _, counts in counted:
        worst |= Counter({pair: n for pair, n in counts.items() if pair[0] != pair[1]})
    # Ties are broken by the classes' order, so that the same counts give the same page.
    pairs = sorted(worst, key=lambda pair: (-worst[pair], pair))[:MOST_MISTAKES]
    totals = [(counts, _totals(counts)) for _, counts in counted]
    rows = tuple(
        (classes[i], classes[j], *(of.get((i, j), 0) / n[i] if n[i] else None for of, n in totals))
        for i, j in pairs
    )
    head = ("True class", "Taken for", *(line.label for line, _ in counted))
    name = "the most frequent mistakes, as shares of the true class"
    return Table(head, rows, ("", "", *[".1%"] * len(counted)), name)
