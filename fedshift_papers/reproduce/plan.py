"""From a study to the runs that it needs, and a forecast of how long they will take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from fedshift.datasets.registry import sized
from fedshift.errors import InputError
from fedshift.experiments.config.load import apply_override, apply_overrides, validate
from fedshift.experiments.config.schema import Config
from fedshift.experiments.measures.served import serving_metrics
from fedshift.experiments.selection import candidates
from fedshift.experiments.task.extras import check_extras
from fedshift.record.rounds import Metrics
from fedshift.record.summary import Final, SetRound
from fedshift.sweeps.store import Run, Store, run_of
from fedshift_papers.protocols.study import Column, Options, Row, Study
from fedshift_papers.reproduce.derived import DERIVED

# Sections of an experiment file that a table sets itself, and what to use instead of -c.
TAKEN = {
    "name": "no name is needed",
    "data.name": "use --dataset",
    "data.validation": "the table sets it",
    "data.test": "the table sets it",
    "shift": "use --split",
    "method": "use --methods",
    "selection": "the table selects by validation",
    "seeds": "use --seeds",
    "training.rounds": "use --rounds",
    "training.evaluate_last": "it follows from the rounds",
    "training.evaluate_every": "the table sets it",
}
# What a summary's "final" says beside `Metrics`: corrected accuracies, bytes, label sets.
OTHERS = (*(f.name for f in fields(Final)), *(f"sets_{f.name}" for f in fields(SetRound)), *DERIVED)
LAMBDA_0: Options = {"lam": 0.0}


@dataclass(frozen=True)
class Plan:
    """A study, at the paper's rounds, seeds and settings or at others.

    tuned     (column key, row label) -> hyper-parameters that replace the row's own
    """

    study: Study
    seeds: tuple[int, ...] | None = None
    rounds: int | None = None
    overrides: tuple[str, ...] = ()
    tuned: Mapping[tuple[str, str], Options] = field(default_factory=dict)

    def seeds_of(self, column: Column) -> tuple[int, ...]:
        """The seeds asked for, or as many as the paper has, from 0."""
        return tuple(range(column.seeds)) if self.seeds is None else self.seeds

    def rounds_of(self, column: Column) -> int:
        """The column's rounds; --rounds N scales all columns by the same factor."""
        if self.rounds is None:
            return column.rounds
        return max(1, self.rounds * column.rounds // self.study.rounds)

    def options_of(self, row: Row, column: Column) -> Options:
        """The row's options, with values tuned for this column and rounds scaled to the run."""
        tuned = self.tuned.get((column.key, row.tuned_as or row.label), {})
        given = {k: v for k, v in options_set(self.overrides).items() if k in row.before}
        options = {**row.options, **column.method_options(row), **tuned, **given}
        rounds = self.rounds_of(column)
        scaled = {k: max(1, options[k] * rounds // column.rounds) for k in row.scaled}
        return options | scaled

    def problem(self, row: Row, column: Column) -> str | None:
        """Why this cell cannot be run here; None if it can."""
        if not row.available:
            return f'this version has no method "{row.method}"'
        absent = column.missing()
        if absent:
            return absent
        metric = self.study.metric_of(row)
        if metric.key not in {*serving_metrics(), *OTHERS, *(f.name for f in fields(Metrics))}:
            return f"this version does not measure {metric.name}"
        try:
            config = config_of(self, row, column, LAMBDA_0 if row.ess else {}, 0)
        except InputError as e:
            return f"cannot be configured in this version: {' '.join(str(e).splitlines())}"
        try:
            check_extras(config.data, config.model)
        except InputError as e:
            return str(e)
        return None


def options_set(overrides: Sequence[str]) -> dict[str, Any]:
    """The options of methods that `-c method.NAME=value` sets; None where no value is given."""
    values: dict[str, Any] = {}
    for override in filter(_of_method, overrides):
        tables: dict[str, Any] = {}
        apply_override(tables, override)
        name = override.partition("=")[0].strip().removeprefix("method.")
        values[name] = tables.get("method", {}).get(name)
    return values


def _of_method(override: str) -> bool:
    return override.strip().startswith("method.")


def _before(study: Study) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"method.{name}" for row in study.rows for name in row.before))


def check_overrides(study: Study, overrides: Sequence[str], whole: Study) -> None:
    """Raise InputError for a `-c` with an unknown key, or with one that the table sets itself.

    Of a method's options only those that count rounds before training may be set, since no number
    of the table is from these rounds. whole: the table with the rows that `--methods` leaves out.
    """
    free = _before(study)
    tables: dict[str, Any] = {}
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in free:
            continue
        if key in _before(whole):
            option = key.removeprefix("method.")
            having = ", ".join(row.key for row in whole.rows if option in row.before)
            raise InputError(f"-c {key}: no row of --methods has it; add one of {having}")
        for taken, instead in TAKEN.items():
            if key == taken or key.startswith(f"{taken}."):
                others = f"; -c sets {' and '.join(free)} alone" * bool(taken == "method" and free)
                raise InputError(f"-c {key}: reproduce sets it itself; {instead}{others}")
        apply_override(tables, override)
    for name, value in options_set(overrides).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"-c method.{name}: {value!r} is no number of rounds; give 1 or more, as in "
                f"method.{name}=1"
            )
    if "size" in tables.get("data", {}):
        # Any data set with a choice of size will do for validation: `with_size` checks the table's.
        tables["data"]["name"] = sized()[0]
    # With this target, [server] may have any of its keys.
    tables |= {"method": {"name": "fedavg"}, "shift": {"target": "uniform"}}
    validate(tables, overrides=overrides)


def with_size(study: Study, overrides: Sequence[str]) -> Study:
    """The study at the image size of `-c data.size`, so that data of that size are looked for.

    Raises InputError if a data set of the study has images of a single size.
    """
    if not any(override.partition("=")[0].strip() == "data.size" for override in overrides):
        return study
    tables: dict[str, Any] = {}
    apply_overrides(tables, overrides)
    size = tables["data"].get("size")
    having = {c.dataset for c in study.columns if c.settings["data"]["name"] in sized()}
    others = {c.dataset for c in study.columns} - having
    if others:
        cure = f"add --dataset {sorted(having)[0]}" if having else "leave it out"
        raise InputError(
            f"-c data.size: images of {', '.join(sorted(others))} have one size; {cure}"
        )
    columns = (
        replace(c, settings={**c.settings, "data": {**c.settings["data"], "size": size}})
        for c in study.columns
    )
    return replace(study, columns=tuple(columns))


def last_rounds(last: int, rounds: int, whole: int) -> int:
    """The number of last rounds to average over: `last` of `whole` rounds, scaled to `rounds`."""
    return max(1, min(last, last * rounds // whole))


def config_of(
    plan: Plan,
    row: Row,
    column: Column,
    options: Options,
    seed: int,
    more: Mapping[str, Options] = {},
) -> Config:
    """The experiment of one cell and seed; `options` override the cell's own.

    more: tables of the experiment file that override the column's.

    A seed has the same split, first model, batches and cohorts in every row, so that cells can be
    compared seed by seed.
    """
    metric, options_of_row = plan.study.metric, plan.options_of(row, column)
    rounds = plan.rounds_of(column) + row.rounds_before(options_of_row)
    tables: dict[str, Any] = column.tables(row)
    tables |= {name: {**tables.get(name, {}), **table} for name, table in more.items()}
    tables["method"] = {"name": row.method, **options_of_row, **options}
    tables["seeds"] = {"run": seed}
    # Overrides of [method] are in the options already, of the rows that have them.
    apply_overrides(tables, [o for o in plan.overrides if not _of_method(o)])
    # Early stopping needs every round evaluated. For a final value it would only cost time.
    every = 1 if metric.stop == "best" or plan.study.curved else rounds
    tables["training"] |= {"rounds": rounds, "evaluate_every": every}
    if metric.last:
        tables["training"]["evaluate_last"] = last_rounds(metric.last, rounds, plan.study.rounds)
    origin = f"{plan.study.name}, {column.key}, {row.label}"
    return validate(tables, origin=origin, overrides=plan.overrides)


@dataclass(frozen=True)
class Candidate:
    """One run that a cell's value may come from, and the options that set it apart."""

    label: str
    options: Options
    run: Run


def runs_of(
    plan: Plan, row: Row, column: Column, seed: int, store: Store
) -> tuple[tuple[Candidate, ...], bool]:
    """(the candidates of one cell and seed, whether these are all of them).

    Which ESS fractions make sense depends on the split, and the run at lambda = 0 reports it. Until
    that run is complete, it is the only candidate. With cohorts all fractions make sense, because
    lambda = 0 gives a smaller ESS within a cohort than over all clients.
    """

    def one(label: str, options: Options) -> Candidate:
        return Candidate(label, options, run_of(config_of(plan, row, column, options, seed)))

    if not row.ess:
        return (one("", {}),), True
    first = one("lambda=0", LAMBDA_0)
    if not store.done(first.run):
        return (first,), False
    summary = store.read(first.run).summary
    config = config_of(plan, row, column, LAMBDA_0, seed)
    if config.training.draws(config.clients):
        return (first, *(one(f"ess={100 * f:g}%", {"ess": f}) for f in row.ess if f)), True
    grid = candidates(summary["label_counts"], summary["target"], row.ess)
    others = [one(label, {"ess": f}) for label, f, _ in grid if f]
    return (first, *others), True


def cells(plan: Plan) -> Iterator[tuple[Row, Column]]:
    """The cells that can be run here, column by column."""
    for column in plan.study.columns:
        for row in plan.study.rows:
            if plan.problem(row, column) is None:
                yield row, column


def wanted(plan: Plan, store: Store) -> dict[str, Run]:
    """Every run that is needed as far as is known, by name: seed by seed, then column by column.

    Some runs show only once others are complete, so it has to be asked again after these.
    """
    pairs = list(cells(plan))
    most = [plan.seeds_of(column) for _, column in pairs]
    # Seed by seed, so that an interrupted table is whole for its first seeds.
    seeds = list(dict.fromkeys(s for seeds in most for s in seeds))
    runs: dict[str, Run] = {}
    for seed in seeds:
        for (row, column), column_seeds in zip(pairs, most, strict=True):
            if seed in column_seeds:
                for candidate in runs_of(plan, row, column, seed, store)[0]:
                    runs[candidate.run.name] = candidate.run
    return runs


def tunable(plan: Plan) -> Iterator[tuple[Row, Column]]:
    """The cells that have a grid."""
    return ((row, column) for row, column in cells(plan) if row.grid)


def tuning_runs(plan: Plan, row: Row, column: Column, seed: int) -> tuple[Candidate, ...]:
    """A run for each combination of the row's hyper-parameters, in the order of the grid."""
    candidates = []
    for values in product(*row.grid.values()):
        options = dict(zip(row.grid, values, strict=True))
        label = ", ".join(f"{k}={v:g}" for k, v in options.items())
        config = config_of(plan, row, column, options, seed, row.grid_tables)
        candidates.append(Candidate(label, options, run_of(config)))
    return tuple(candidates)


def seconds_left(plan: Plan, store: Store) -> tuple[int, float]:
    """(number of runs that are not over, their processor seconds sum_r rounds_r s_r).

    s_r is `Study.seconds` of the run's row. A run that was begun counts as a whole one.
    """
    seconds: dict[str, float] = {}
    for row, column in cells(plan):
        for seed in plan.seeds_of(column):
            for candidate in runs_of(plan, row, column, seed, store)[0]:
                each = plan.study.seconds.get(row.key, 0.0)
                if not store.over(candidate.run):
                    rounds = candidate.run.config.training.rounds
                    seconds[candidate.run.name] = rounds * each
    return len(seconds), sum(seconds.values())


def forecast(plan: Plan, store: Store, jobs: int) -> str | None:
    """A sentence on the time left; None if no seconds were measured, or if all runs are over."""
    if not plan.study.seconds:
        return None
    runs, seconds = seconds_left(plan, store)
    if not runs:
        return None
    return (
        f"forecast: {runs} runs, about {_hours(seconds)} of one core as measured for this table, "
        f"{_hours(seconds / jobs)} with --jobs {jobs}; interrupt it when you like, the same "
        "command goes on from there"
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"
