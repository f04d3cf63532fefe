"""Hyper-parameters by validation: train a grid, keep the best, remember it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.experiments.reproduce.plan import Plan, tunable, tuning_runs
from fedshift.experiments.reproduce.results import pick, scores
from fedshift.experiments.reproduce.store import Run, Store
from fedshift.experiments.reproduce.study import Options
from fedshift.files import clean, write

Key = tuple[str, str]
Records = Mapping[Key, Mapping[str, Any]]


def grid_runs(plan: Plan) -> dict[str, Run]:
    """The runs of every grid, by name, on each column's first seed."""
    return {
        candidate.run.name: candidate.run
        for row, column in tunable(plan)
        for candidate in tuning_runs(plan, row, column, plan.seeds_of(column)[0])
    }


def choose_tuned(plan: Plan, store: Store, before: Records) -> dict[Key, Mapping[str, Any]]:
    """`before` with a new record for every grid that is complete.

    The grid point of highest accuracy on target-like validation examples wins, at the round of
    lowest validation loss; of equals the one of lower loss. Chosen: one seed, the first; the paper
    does not say on how many it tuned.
    """
    records = dict(before)
    for row, column in tunable(plan):
        seed = plan.seeds_of(column)[0]
        grid = tuning_runs(plan, row, column, seed)
        if not all(store.done(c.run) for c in grid):
            continue
        done = [store.read(c.run) for c in grid]
        seen = [scores(f, plan.study.metric) for f in done]
        records[column.key, row.label] = {
            "column": column.key,
            "row": row.label,
            "options": dict(grid[pick(done, plan.study.metric)].options),
            "seed": seed,
            "rounds": plan.rounds_of(column),
            "changed": list(plan.overrides),
            "grid": [
                {
                    "options": dict(c.options),
                    "validation_accuracy": s["validation_accuracy"],
                    "validation_loss": s["validation_loss"],
                    "round": s["round"],
                    "run": c.run.name,
                }
                for c, s in zip(grid, seen, strict=True)
            ],
        }
    return records


def options_of(records: Records) -> dict[Key, Options]:
    """The tuned hyper-parameters alone."""
    return {key: dict(record["options"]) for key, record in records.items()}


def write_tuned(path: Path, records: Records) -> None:
    """tuned.json: one record per column and row, with the evidence."""
    listed = [records[key] for key in sorted(records)]
    write(path, json.dumps(clean(listed), indent=1) + "\n")
