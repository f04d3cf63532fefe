"""From runs to the rows of a comparison: each run's numbers, and each method over its seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedshift.errors import unknown
from fedshift.record.headline import OWN
from fedshift.report.intervals import Moments, bounds_of, moments
from fedshift.sweeps.execute import Report
from fedshift.sweeps.plan import Contender, Plan, units_in_words
from fedshift.sweeps.statistics import paired
from fedshift.sweeps.store import Run, Store

Facts = Mapping[str, Any]
# Numbers at the target -> the same numbers of the model that is corrected for the target.
CORRECTED = {name: f"{name}_corrected" for name in ("target_accuracy", "target_loss")}


@dataclass(frozen=True)
class RunResult:
    """One run of a setting: its numbers by name (`facts`), or why there are none.

    state   "done", "diverged", "failed" or "not run"
    target  the client that is held out, if targets vary; seed is its place among them
    """

    method: str
    setting: str
    seed: int
    run: Run
    state: str
    why: str = ""
    facts: Facts = field(default_factory=dict)
    target: str = ""

    def number(self, name: str) -> float | None:
        """A number of the run; None where it has none."""
        value = self.facts.get(name)
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Row:
    """A method: the setting that validation chose, and its runs over the seeds.

    moments               of the metric
    difference            of the metric to the base, paired
    corrected             of the models corrected for the target, if accuracy or loss is compared
    corrected_difference  of these to the base's corrected models, paired
    validation            the mean that each setting was chosen by; {} if there is one setting
    """

    label: str
    setting: str
    runs: tuple[RunResult, ...]
    moments: Moments | None = None
    difference: Moments | None = None
    corrected: Moments | None = None
    corrected_difference: Moments | None = None
    validation: Mapping[str, float | None] = field(default_factory=dict)

    def values(self, name: str) -> dict[int, float]:
        """The number `name` of the method's runs, by seed; without those that do not have it."""
        numbers = {m.seed: m.number(name) for m in self.runs}
        return {s: v for s, v in numbers.items() if v is not None and math.isfinite(v)}

    def mean(self, name: str) -> float | None:
        """The mean of a number over the seeds; None if no run has it."""
        values = self.values(name).values()
        return math.fsum(values) / len(values) if values else None

    @property
    def note(self) -> str:
        """The seeds that are missing, and why."""
        gone: dict[str, list[int]] = {}
        for m in self.runs:
            if m.state != "done":
                gone.setdefault(f"{m.state}{f': {m.why}' * bool(m.why)}", []).append(m.seed)
        words = partial(units_in_words, targets=self.targets)
        return "; ".join(f"{words(of)} {how}" for how, of in gone.items())

    @property
    def targets(self) -> tuple[str, ...]:
        """The clients that its runs hold out; () if seeds vary."""
        return tuple(m.target for m in sorted(self.runs, key=lambda m: m.seed) if m.target)

    def worst(self, name: str) -> float | None:
        """The mean of the worst tenth of its runs, at least one; None if no run has the number."""
        values = sorted(self.values(name).values(), reverse=smaller_is_better(name))
        worst = values[: math.ceil(len(values) / 10)]
        return math.fsum(worst) / len(worst) if worst else None


def run_results(plan: Plan, store: Store, report: Report) -> tuple[RunResult, ...]:
    """The result of every run of the plan. Raises DataError for a damaged run folder."""
    states: dict[str, tuple[str, str, Facts]] = {}
    for name, run in plan.runs.items():
        if store.done(run):
            summary = store.read(run).summary
            # Where both have a number, that of the final model replaces the last round's.
            states[name] = (
                "done",
                "",
                (summary.get("last") or {})
                | summary["final"]
                | {k: summary.get(k) for k in ("ess", "ess_fraction", "distance", "hull_distance")},
            )
        elif (ended := store.diverged(run)) is not None:
            states[name] = "diverged", ended.error, {}
        elif name in report.failures:
            states[name] = "failed", report.failures[name], {}
        else:
            states[name] = "not run", "", {}
    return tuple(
        RunResult(
            contender.label,
            point.label,
            seed,
            run,
            *states[run.name],
            target=plan.targets[seed] if plan.targets else "",
        )
        for contender in plan.contenders
        for point in contender.points
        for seed, run in point.runs.items()
    )


def metric_of(plan: Plan, runs: Iterable[RunResult]) -> str:
    """The name of the number that is compared. Raises InputError for one that no run has."""
    done = [m for m in runs if m.state == "done"]
    names = dict.fromkeys(k for m in done for k in m.facts if m.number(k) is not None)
    if plan.metric is None:
        # In this order: if clients serve models of their own, these are what `fit` reports; in
        # regression there is no accuracy.
        first = (OWN, "target_accuracy", "rmse", "target_loss")
        return next((name for name in first if name in names), "target_accuracy")
    if done and plan.metric not in names:
        raise unknown("metric", plan.metric, names)
    return plan.metric


def rows_of(plan: Plan, runs: Sequence[RunResult], metric: str) -> tuple[Row, ...]:
    """A row per method, at the setting that validation chose, beside the base."""
    rows = [_row(plan, contender, runs, metric) for contender in plan.contenders]
    base = next(row for row in rows if row.label == plan.base)
    moved = CORRECTED.get(metric)
    return tuple(
        row
        if row is base
        else replace(
            row,
            difference=_difference(row, base, metric),
            corrected_difference=_difference(row, base, moved) if moved else None,
        )
        for row in rows
    )


def _row(plan: Plan, contender: Contender, runs: Sequence[RunResult], metric: str) -> Row:
    by_point = {
        p.label: tuple(m for m in runs if (m.method, m.setting) == (contender.label, p.label))
        for p in contender.points
    }
    rows = {label: Row(contender.label, label, of) for label, of in by_point.items()}
    by = {label: chosen_by(plan, row.runs) for label, row in rows.items()}
    merits = {label: row.mean(by[label]) for label, row in rows.items()}

    def merit(label: str) -> tuple[int, float]:
        """Order settings by complete seeds first: one that diverges on a seed must not win."""
        done = sum(m.state == "done" for m in rows[label].runs)
        value, sign = merits[label], -1 if smaller_is_better(by[label]) else 1
        # Rounded: sums of the same numbers in another order are equal.
        return done, -math.inf if value is None else round(sign * value, 12)

    row = rows[max(rows, key=merit)]  # the first of equals
    several = merits if len(merits) > 1 else {}
    moved = CORRECTED.get(metric)
    corrected = _moments(row, moved) if moved else None
    return replace(row, moments=_moments(row, metric), corrected=corrected, validation=several)


def _moments(row: Row, metric: str) -> Moments | None:
    values = list(row.values(metric).values())
    return moments(values, within=bounds_of(metric, values)) if values else None


def chosen_by(plan: Plan, runs: Sequence[RunResult]) -> str:
    """The name of the number that settings are chosen by.

    It is measured on validation examples, never on the target's test examples. If clients serve
    models of their own, it is their accuracy on the clients' own validation examples.
    """
    if any("average_accuracy" in m.facts for m in runs):
        return "source_accuracy"
    if any("estimated_loss" in m.facts for m in runs):
        return "estimated_loss"
    if plan.rule == "validation":
        return "validation_accuracy"
    # If runs correct their models, the corrected ones are compared, as `ess = "auto"` does.
    moved = "estimated_accuracy_corrected"
    return moved if any(m.number(moved) is not None for m in runs) else "estimated_accuracy"


def smaller_is_better(metric: str) -> bool:
    """Whether a number is an error or a loss; tells by its name."""
    of = metric.removesuffix("_corrected")
    return of.endswith(("loss", "rmse")) or of == "mae"


def _difference(row: Row, base: Row, metric: str) -> Moments | None:
    ours, theirs = row.values(metric), base.values(metric)
    return paired(ours, theirs, within=bounds_of(metric, (*ours.values(), *theirs.values())))
