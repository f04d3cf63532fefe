"""Hyper-parameters by validation: train a grid, keep the best, remember it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.experiments.reproduce.plan import Candidate, Plan, tunable, tuning_runs
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
    lowest validation loss; of equals the one of lower loss. One that diverged cannot win. Chosen:
    one seed, the first; the paper does not say on how many it tuned.
    """
    records = dict(before)
    for row, column in tunable(plan):
        seed = plan.seeds_of(column)[0]
        grid = tuning_runs(plan, row, column, seed)
        left = [c for c in grid if store.diverged(c.run) is None]
        if not left or not all(store.done(c.run) for c in left):
            continue
        done = [store.read(c.run) for c in left]
        seen = {c.run.name: scores(f, plan.study.metric) for c, f in zip(left, done, strict=True)}
        records[column.key, row.label] = {
            "column": column.key,
            "row": row.label,
            "options": dict(left[pick(done, plan.study.metric)].options),
            "seed": seed,
            "rounds": plan.rounds_of(column),
            "changed": list(plan.overrides),
            "grid": [_evidence(c, seen.get(c.run.name)) for c in grid],
        }
    return records


def _evidence(c: Candidate, seen: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a point of the grid came to; nothing but its run where it diverged."""
    facts = ("validation_accuracy", "validation_loss", "round")
    return {
        "options": dict(c.options),
        **{fact: None if seen is None else seen[fact] for fact in facts},
        "run": c.run.name,
    }


def options_of(records: Records) -> dict[Key, Options]:
    """The tuned hyper-parameters alone."""
    return {key: dict(record["options"]) for key, record in records.items()}


def write_tuned(path: Path, records: Records) -> None:
    """tuned.json: one record per column and row, with the evidence."""
    listed = [records[key] for key in sorted(records)]
    write(path, json.dumps(clean(listed), indent=1) + "\n")
