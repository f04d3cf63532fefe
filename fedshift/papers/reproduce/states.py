"""What is known of each table and figure: where it was measured, and which data it still needs."""

from __future__ import annotations

from collections.abc import Callable

from fedshift.papers.pictures.picture import Figure
from fedshift.papers.protocols.printed import printed_rows
from fedshift.papers.protocols.study import missing_data
from fedshift.papers.reproduce.catalogue import Target

Missing = Callable[..., str | None]


def measured(name: str) -> tuple[str, ...]:
    """The folders of the project's repository that have the table, with its command."""
    return tuple(row["folder"] for row in printed_rows("measured") if row["target"] == name)


def data_sets(one: Target) -> tuple[str, ...]:
    """Those that are used where --dataset names none."""
    if isinstance(one, Figure):
        return one.datasets
    return tuple(dict.fromkeys(c.settings["data"]["name"] for c in one.columns if not c.extra))


def absent(one: Target, missing: Missing = missing_data) -> tuple[str, ...]:
    """Data sets of a table that are not here, or too small; `missing` looks for one."""
    if isinstance(one, Figure):
        return tuple(name for name in data_sets(one) if missing(name) is not None)
    lacking = (c.data[0] for c in one.columns if not c.extra and missing(*c.data))
    return tuple(dict.fromkeys(lacking))


def state_of(one: Target, missing: Missing = missing_data) -> str:
    """In words: measured here, runs here, or runs where data are given."""
    places, lacking = measured(one.name), absent(one, missing)
    runs = "is drawn" if isinstance(one, Figure) else "runs"
    rest = [name for name in data_sets(one) if name not in lacking]
    parts = [f"measured here: {', '.join(places)}"] if places else []
    if lacking:
        here = f"{runs} here on {', '.join(rest)}, and " if rest and not places else f"{runs} "
        parts.append(f"{here}where data are given: {', '.join(lacking)}")
    return "; ".join(parts) or f"{runs} here"
