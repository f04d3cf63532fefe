"""How long a table will take, from processor seconds that were measured once."""

from __future__ import annotations

from fedshift.papers.reproduce.plan import Plan, cells, runs_of
from fedshift.sweeps.store import Store


def seconds_left(plan: Plan, store: Store) -> tuple[int, float]:
    """(runs that are not over, their processor seconds): sum_r rounds_r s_r.

    s_r is `Study.seconds` of the run's row; a run that was begun counts as a whole one.
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
    """A sentence; None for a table without measured seconds, and where all is complete."""
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
