"""From complete runs to the cells of a table: our numbers and the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fedshift.errors import DataError
from fedshift.report.intervals import LEVEL, Moments, moments
from fedshift.sweeps.statistics import INTERVALS, paired
from fedshift.sweeps.store import Finished, Run, Store
from fedshift_papers.protocols.study import Column, Metric, Options, Printed, Row
from fedshift_papers.reproduce.derived import DERIVED
from fedshift_papers.reproduce.plan import Candidate, Plan, runs_of


@dataclass(frozen=True)
class Value:
    """One seed of a cell, in the paper's unit, with the run it comes from.

    chosen       the label of the chosen candidate, as "ess=25%"; "" if there was one alone
    others       the candidates that validation did not choose
    distance     from T to the hull of the clients' marginals
    over_rounds  standard deviation over rounds, if the value is a mean over rounds
    diverged     the last round evaluated before training diverged; None if it did not
    """

    seed: int
    value: float
    round: int
    run: Run
    lock: Mapping[str, Any]
    config_sha256: str
    chosen: str = ""
    others: tuple[Run, ...] = ()
    validation: float | None = None
    ess_fraction: float | None = None
    distance: float | None = None
    over_rounds: float | None = None
    diverged: int | None = None


@dataclass(frozen=True)
class Cell:
    """One cell: the paper's number, ours, and what differs from the paper.

    options      of the method, with tuned ones
    problem      why the cell cannot be run here
    absent       sentences on seeds whose run is complete, but has no value
    failures     messages of runs that failed just now, or diverged without another candidate
    diverged     candidates that diverged, and so cannot be chosen
    lost         the runs that diverged
    twin         another row that has the same runs, because so few rounds make its options equal
    difference   to the baseline of the column, over the seeds that both have
    """

    row: Row
    column: Column
    rounds: int
    options: Options
    printed: Printed | None
    problem: str | None = None
    values: tuple[Value, ...] = ()
    failures: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    diverged: tuple[str, ...] = ()
    lost: tuple[Run, ...] = ()
    twin: str = ""
    moments: Moments | None = None
    difference: Moments | None = None

    @property
    def by_seed(self) -> dict[int, float]:
        """The values by seed."""
        return {v.seed: v.value for v in self.values}

    @property
    def stopped(self) -> tuple[str, ...]:
        """Seeds whose only run diverged, and counts at its best round before that."""
        ended = [(v.seed, v.diverged) for v in self.values if v.diverged is not None]
        return tuple(f"seed {seed} after round {t}" for seed, t in ended)

    @property
    def note(self) -> str:
        """The differences from the paper's cell, in a few words; "" if there are none."""
        if self.problem:
            return self.problem
        notes = ["not in the paper"] if self.column.extra else []
        notes += [self.column.differs] if self.column.differs else []
        if self.rounds != self.column.rounds:
            notes.append(f"{self.rounds} of {self.column.rounds} rounds")
        if len(self.values) != self.column.seeds:
            notes.append(f"{len(self.values)} of {self.column.seeds} seeds")
        notes += self._shares()
        notes += [f'the same runs as "{self.twin}"'] if self.twin else []
        notes += [f"{len(self.failures)} failed"] if self.failures else []
        notes += [f"{len(self.absent)} without a value"] if self.absent else []
        notes += [f"candidates that diverged: {', '.join(self.diverged)}"] if self.diverged else []
        notes += [f"{len(self.stopped)} diverged, at the best round before"] if self.stopped else []
        return ", ".join(notes)

    def _shares(self) -> list[str]:
        """Options in rounds whose share of a shorter run differs from the paper's, by rounding."""
        whole, notes = {**self.row.options, **self.column.method_options(self.row)}, []
        for name in self.row.scaled:
            here, planned = self.options[name] / self.rounds, whole[name] / self.column.rounds
            if abs(here - planned) > 1e-9:
                part = f"{name} = {self.options[name]} of {self.rounds}"
                notes.append(f"{part}: {100 * here:.3g} % in place of {100 * planned:.3g} %")
        return notes


def collect(plan: Plan, store: Store, failures: Mapping[str, str]) -> tuple[Cell, ...]:
    """Every cell of the study, from complete runs. Raises DataError for a damaged run folder."""
    study, results = plan.study, []
    for column in study.columns:
        cells = [_cell(plan, row, column, store, failures) for row in study.rows]
        by_label = {c.row.label: c for c in cells}
        for cell in (replace(c, twin=_twin(c, cells)) for c in cells):
            base = by_label.get(cell.row.against or study.baseline)
            if base is not None and cell.row is not base.row:
                within = study.metric_of(cell.row).within
                difference = paired(cell.by_seed, base.by_seed, kind=study.interval, within=within)
                cell = replace(cell, difference=difference)
            results.append(cell)
    return tuple(results)


def _twin(cell: Cell, cells: Sequence[Cell]) -> str:
    """The label of a row whose options differ in the paper, but are the same here; or ""."""
    row = cell.row
    # Only options that count rounds shrink in a shorter run, and so can become equal.
    for other in (c for c in cells if row.scaled and c.row.method == row.method):
        alike = other.options == cell.options and other.row.reads == row.reads
        if alike and other.row.options != row.options:
            return other.row.label
    return ""


def _cell(plan: Plan, row: Row, column: Column, store: Store, failures: Mapping[str, str]) -> Cell:
    cell = Cell(
        row,
        column,
        plan.rounds_of(column),
        plan.options_of(row, column),
        plan.study.printed.get((column.title, column.split, row.label)),
        plan.problem(row, column),
    )
    if cell.problem is not None:
        return cell
    values, failed, absent, diverged, over = [], [], [], [], []
    metric = plan.study.metric_of(row)
    for seed in plan.seeds_of(column):
        options, whole = runs_of(plan, row, column, seed, store)
        failed += [failures[c.run.name] for c in options if c.run.name in failures]
        lost = {c.label: end.error for c in options if (end := store.diverged(c.run)) is not None}
        over += [c.run for c in options if c.label in lost]
        early = _ended_early(options, store, metric) if whole else []
        done = early or [c for c in options if store.done(c.run)]
        if not done:
            failed += lost.values()
        # While a candidate is still to be trained there is no value: validation may choose it.
        elif whole and all(c in done or c.label in lost for c in options):
            value = _value(seed, done, store, metric, row.picked_by)
            values += [] if value is None else [value]
            absent += [_why_not(seed, done, store, metric)] if value is None else []
            diverged += [] if early else [f"{label} of seed {seed}" for label in lost]
    over_seeds = INTERVALS[plan.study.interval]
    summed = over_seeds([v.value for v in values], LEVEL, metric.within) if values else None
    return replace(
        cell,
        values=tuple(values),
        failures=tuple(failed),
        absent=tuple(absent),
        diverged=tuple(diverged),
        lost=tuple(over),
        moments=summed,
    )


def _ended_early(options: Sequence[Candidate], store: Store, metric: Metric) -> Sequence[Candidate]:
    """A seed's only run, if it diverged and early stopping would have kept an earlier round."""
    ended = store.diverged(options[0].run) if len(options) == 1 else None
    return options if metric.stop == "best" and ended is not None and ended.best else []


def _why_not(seed: int, options: Sequence[Candidate], store: Store, metric: Metric) -> str:
    """Why a complete run has no value, for example because the refit of its router failed."""
    # `fedshift.experiments.measures.served` wrote this sentence into the run's summary.
    layer = f"The router has no {metric.key.partition('_')[0]} layer"
    reasons = [s for c in options for s in store.read(c.run).summary.get("why", ())]
    matching = [s for s in reasons if s.startswith(layer)]
    return (
        f"seed {seed}: {matching[0]}" if matching else f"seed {seed}: its run has no {metric.key}."
    )


def _value(
    seed: int, options: Sequence[Candidate], store: Store, metric: Metric, picked_by: str
) -> Value | None:
    """A seed's value; None if its run says that it has none, as after a refit that failed."""
    done = [store.read(c.run) for c in options]
    best = pick(done, metric, picked_by) if len(done) > 1 else 0
    chosen, facts = done[best], facts_of(done[best], metric)
    ended = store.diverged(chosen.run)
    if metric.key in facts and facts[metric.key] is None:
        return None
    if not isinstance(facts.get(metric.key), int | float):
        why = f"its summary has no {metric.key}; another version may have trained it"
        raise store.damaged(chosen.run, why)
    value = float(facts[metric.key])
    return Value(
        seed,
        metric.scale * (_over_rounds(chosen.run, store, metric) if metric.span else value),
        int(facts["round"]),
        chosen.run,
        chosen.lock,
        chosen.config_sha256,
        options[best].label,
        tuple(c.run for i, c in enumerate(options) if i != best),
        facts.get("validation_accuracy"),
        chosen.summary.get("ess_fraction"),
        chosen.summary.get("hull_distance"),
        _scale(facts.get(f"{metric.key}_sd"), metric) if facts.get("rounds", 0) > 1 else None,
        None if ended is None else ended.rounds,
    )


def _over_rounds(run: Run, store: Store, metric: Metric) -> float:
    """The mean, or the minimum, over the last evaluated rounds."""
    curve = store.curve(run, metric.key)
    last = [curve[t] for t in sorted(curve)[-metric.span :]]
    return min(last) if metric.of == "least" else fmean(last)


def _scale(value: Any, metric: Metric) -> float | None:
    return metric.scale * float(value) if isinstance(value, int | float) else None


def facts_of(finished: Finished, metric: Metric) -> Mapping[str, Any]:
    """`scores`, with the metric added if it has to be computed from other numbers (`DERIVED`)."""
    facts = scores(finished, metric)
    make = DERIVED.get(metric.key)
    return facts if make is None else {**facts, metric.key: make(finished.summary)}


def scores(finished: Finished, metric: Metric) -> Mapping[str, Any]:
    """The numbers in a summary of the round that counts. Raises DataError if it has none."""
    facts = finished.summary.get(metric.stop)
    if not isinstance(facts, dict):
        raise DataError(
            f"{finished.run.name}: its summary has no {metric.stop} round; without examples that "
            "follow the target there is no early stopping"
        )
    return facts


def pick(done: Sequence[Finished], metric: Metric, picked_by: str = "validation_accuracy") -> int:
    """The index of the candidate with the highest `picked_by` at the round that counts.

    Ties go to the larger effective sample size, then to the lower validation loss, then to the
    first.
    """

    def merit(i: int) -> tuple[float, float, float]:
        facts = scores(done[i], metric)
        loss = facts.get("validation_loss")
        ess = float(done[i].summary.get("ess") or 0.0)
        accuracy = facts.get(picked_by)
        return (
            -math.inf if accuracy is None else float(accuracy),
            ess,
            -float(loss) if isinstance(loss, int | float) else -math.inf,
        )

    return max(range(len(done)), key=merit)


def mean_curve(cell: Cell, store: Store, metric: Metric) -> dict[int, Moments]:
    """The metric over the cell's seeds by round, for rounds that all of them have.

    Seeds whose training diverged are left out, unless all did. Rounds that only fit densities are
    not counted.
    """
    # A run that diverged has no later rounds. With it, the mean curve would end there.
    whole = [v for v in cell.values if v.diverged is None] or cell.values
    curves = [store.curve(v.run, metric.key) for v in whole]
    if not curves:
        return {}
    before = cell.row.rounds_before(cell.options)
    common = sorted(t for t in set(curves[0]).intersection(*curves[1:]) if t > before)
    return {
        t - before: moments([metric.scale * c[t] for c in curves], within=metric.within)
        for t in common
    }
