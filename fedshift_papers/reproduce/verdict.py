"""The sentences under a table: verdicts, margins, and rows without a value."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.report.intervals import Moments
from fedshift.sweeps.statistics import paired
from fedshift.sweeps.texts import difference
from fedshift_papers.protocols.study import Study
from fedshift_papers.reproduce.results import Cell


def verdicts(study: Study, cells: Sequence[Cell]) -> tuple[str, ...]:
    """For every column with runs, a sentence on who beats whom.

    It compares the rows of `study.verdict` with the baseline, and the two rows of each pair in
    `study.compared`. "beats" means that the 95 % interval of the paired difference is above 0, "is
    worse than" that it is below 0; otherwise it "does not clearly beat". Below three seeds there is
    no interval, and the sentence says so.
    """
    lines = []
    for column in study.columns:
        of = {c.row.label: c for c in cells if c.column is column}
        outcomes = [_outcome(c, study) for label, c in of.items() if label in study.verdict]
        pairs = [pair for pair in study.compared if of.keys() >= set(pair)]
        outcomes += [_beside(of[one], of[other], study) for one, other in pairs]
        if outcomes := [text for text in outcomes if text]:
            where = f"{column.title} {column.split}"
            lines.append(f"Found on {where}: {'; '.join(outcomes)}.")
    return tuple(lines)


def margins(study: Study, cells: Sequence[Cell]) -> tuple[str, ...]:
    """For every column, how far rows of `study.verdict` are ahead of the best in each group."""
    lines = []
    for column in study.columns:
        means = {c.row.label: c.moments.mean for c in cells if c.column is column and c.moments}
        for label in study.verdict:
            parts = []
            for words, rivals in study.rivals.items():
                done = [r for r in rivals if r in means]
                if label in means and len(done) == len(rivals):
                    best = max(done, key=lambda rival: means[rival])
                    ahead = f"{means[label] - means[best]:+.{study.metric.digits}f}"
                    parts.append(f'{ahead} over the best {words}, "{best}"')
            if parts:
                where = f"{column.title} {column.split}"
                lines.append(f'Margin of "{label}" on {where}: {"; ".join(parts)}.')
    return tuple(lines)


def without_value(cells: Sequence[Cell]) -> tuple[str, ...]:
    """For every row and seed whose run is complete, but has no value: why."""
    return tuple(
        f'No value of "{c.row.label}" on {c.column.title} {c.column.split}, {why}'
        for c in cells
        for why in c.absent
    )


def stopped_early(cells: Sequence[Cell]) -> tuple[str, ...]:
    """For every row, the runs that diverged and count at their best round before that."""
    return tuple(
        f"Diverged: {c.row.label} on {c.column.title} {c.column.split}, {', '.join(c.stopped)}. "
        "What was best on validation before that counts, as early stopping would have kept it."
        for c in cells
        if c.stopped
    )


def _outcome(cell: Cell, study: Study) -> str:
    label, lost = cell.row.label, len(cell.absent)
    if cell.difference is None:
        return f'"{label}" has no value ({lost} of {lost} seeds)' if lost else ""
    behind = f" ({lost} more without a value)" if lost else ""
    return _compare(label, study.baseline, cell.difference, study.metric.digits) + behind


def _beside(cell: Cell, other: Cell, study: Study) -> str:
    """How one row of a pair compares with the other, and on how many seeds it is ahead; or ""."""
    metric, base = study.metric_of(cell.row), other.by_seed
    result = paired(cell.by_seed, base, kind=study.interval, within=metric.within)
    if result is None:
        return ""
    ahead = sum(value > base[seed] for seed, value in cell.by_seed.items() if seed in base)
    text = _compare(cell.row.label, other.row.label, result, metric.digits)
    return f"{text}, ahead on {ahead}"


def _compare(label: str, against: str, result: Moments, digits: int) -> str:
    value = difference(result, digits)
    row, baseline = f'"{label}"', f'"{against}"'
    if result.low is None or result.high is None:
        side = "above" if result.mean > 0 else "not above"
        seeds = "a single seed" if result.n == 1 else f"{result.n} seeds"
        return f"{row} is {side} {baseline} on {seeds}: {value}"
    if result.low > 0:
        outcome = "beats"
    else:
        outcome = "is worse than" if result.high < 0 else "does not clearly beat"
    return f"{row} {outcome} {baseline}: {value}, {result.n} seeds"
