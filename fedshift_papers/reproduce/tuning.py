"""Tuning hyper-parameters: train a grid, choose the best point by validation, and store it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshift.errors import DataError, InputError
from fedshift.files import clean, is_file, write
from fedshift.sweeps.store import Finished, Run, Store
from fedshift_papers.protocols.study import Column, Metric, Options, Row
from fedshift_papers.reproduce.plan import Candidate, Plan, config_of, tunable, tuning_runs
from fedshift_papers.reproduce.results import pick, scores

Key = tuple[str, str]
Records = Mapping[Key, Mapping[str, Any]]


def grid_runs(plan: Plan) -> dict[str, Run]:
    """The runs of every grid, by name, on each column's first seed."""
    return {
        candidate.run.name: candidate.run
        for row, column in tunable(plan)
        for candidate in tuning_runs(plan, row, column, plan.seeds_of(column)[0])
    }


def choose_tuned(plan: Plan, store: Store) -> dict[Key, Mapping[str, Any]]:
    """A record for every grid of the plan that is complete.

    The grid point with the highest accuracy on validation examples that follow the target wins, at
    the round of lowest validation loss; ties go to the lower loss. A point that diverged cannot
    win. If all points have the same accuracy, validation says nothing, and the row keeps its
    default ("undecided" in the record). That is chosen, and so is tuning on one seed, the first:
    the paper does not say on how many it tuned.
    """
    records: dict[Key, Mapping[str, Any]] = {}
    for row, column in tunable(plan):
        seed = plan.seeds_of(column)[0]
        grid = tuning_runs(plan, row, column, seed)
        remaining = [c for c in grid if store.diverged(c.run) is None]
        if not remaining or not all(store.done(c.run) for c in remaining):
            continue
        done = [store.read(c.run) for c in remaining]
        default = {**row.options, **column.method_options(row)}
        undecided = says_nothing(done, plan.study.metric, row.picked_by)
        best = remaining[pick(done, plan.study.metric, row.picked_by)].options
        scores_by_run = {
            c.run.name: scores(f, plan.study.metric) for c, f in zip(remaining, done, strict=True)
        }
        records[column.key, row.label] = {
            "column": column.key,
            "row": row.label,
            "options": {name: default[name] for name in row.grid} if undecided else dict(best),
            "undecided": undecided,
            "seed": seed,
            "rounds": plan.rounds_of(column),
            "changed": list(plan.overrides),
            "grid": [_evidence(c, scores_by_run.get(c.run.name), row.picked_by) for c in grid],
        }
    return records


def says_nothing(
    done: Sequence[Finished], metric: Metric, picked_by: str = "validation_accuracy"
) -> bool:
    """Whether all points of a grid have the same validation accuracy at the round that counts."""
    return len({scores(one, metric).get(picked_by) for one in done}) == 1 < len(done)


def _evidence(c: Candidate, run_scores: Mapping[str, Any] | None, picked_by: str) -> dict[str, Any]:
    """A grid point's options, run and scores, for the record; scores are None if it diverged."""
    facts = dict.fromkeys((picked_by, "validation_accuracy", "validation_loss", "round"))
    kept = (fact for fact in facts if run_scores is None or fact in run_scores)
    return {
        "options": dict(c.options),
        **{fact: None if run_scores is None else run_scores[fact] for fact in kept},
        "run": c.run.name,
    }


def read_tuned(path: Path, plan: Plan | None = None) -> dict[Key, dict[str, Any]]:
    """tuned.json as (column key, row label) -> record; {} if there is no such file.

    Raises DataError for a damaged file, and for values that a cell of the plan cannot have.
    """
    if not is_file(path):
        return {}
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise _odd(path, str(e)) from None
    if not isinstance(listed, list):
        raise _odd(path, "not a list of records")
    kinds = {"column": str, "row": str, "options": dict, "seed": int, "rounds": int}
    for i, record in enumerate(listed, 1):
        for name, kind in kinds.items():
            if not isinstance(record, dict) or not isinstance(record.get(name), kind):
                raise _odd(path, f'record {i} has no "{name}"')
        changed = record.get("changed", [])
        if not isinstance(changed, list) or not all(isinstance(text, str) for text in changed):
            raise _odd(path, f'"changed" of record {i} is no list of overrides')
    records = {(record["column"], record["row"]): record for record in listed}
    if plan is not None:
        for row, column in tunable(plan):
            if (key := (column.key, row.label)) in records:
                _check(path, plan, row, column, records[key]["options"])
    return records


def _check(path: Path, plan: Plan, row: Row, column: Column, options: Mapping[str, Any]) -> None:
    """Raise DataError for other names than the grid's, and for values that are not allowed."""
    where = f"{column.key}, {row.label}"
    if options.keys() != row.grid.keys():
        names = ", ".join(row.grid)
        raise _odd(path, f"{where}: {', '.join(options) or 'nothing'} in place of {names}")
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _odd(path, f"{where}: {name} = {value!r} is no number")
    try:
        config_of(replace(plan, tuned={(column.key, row.label): options}), row, column, {}, 0)
    except InputError as e:
        raise _odd(path, str(e)) from None


def _odd(path: Path, why: str) -> DataError:
    return DataError(f"{path}: {why}. Delete it to tune again.")


def options_of(records: Records) -> dict[Key, Options]:
    """The tuned hyper-parameters alone."""
    return {key: dict(record["options"]) for key, record in records.items()}


def add_tuned(path: Path, records: Records) -> Records:
    """Add records to tuned.json, beside those of other columns and rows; return all of them.

    The file is read again here: another process may have added records while this one trained.
    """
    with _one_at_a_time(path.parent):
        merged = {**read_tuned(path), **records}
        listed = [merged[key] for key in sorted(merged)]
        write(path, json.dumps(clean(listed), indent=1) + "\n")
    return merged


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for other processes that are in this block; no lock if the system or disk has none."""
    if importlib.util.find_spec("fcntl") is None:
        yield
        return
    import fcntl

    # The folder is locked and not the file, because writing replaces the file by a rename.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
