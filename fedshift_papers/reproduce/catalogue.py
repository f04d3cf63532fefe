"""The tables and figures that can be reproduced, and the state of each."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from fedshift.errors import InputError, unknown
from fedshift_papers.pictures.figures import figures
from fedshift_papers.pictures.picture import Figure
from fedshift_papers.protocols import (
    feddrm,
    feddrm_two_cores,
    fedpals,
    labelset_natural,
    labelset_tuning,
    labelsets,
    made,
    participation,
    routing,
)
from fedshift_papers.protocols.study import Study, missing_data, printed_rows

# A study needs runs. A figure is drawn from data alone.
Target = Study | Figure
Missing = Callable[..., str | None]


def studies() -> dict[str, Study]:
    """Every study of every paper, by name."""
    sets = (labelsets, labelset_tuning, labelset_natural)
    papers = (fedpals, feddrm, feddrm_two_cores, routing, *sets, made, participation)
    return {name: study for paper in papers for name, study in paper.studies().items()}


def study(name: str) -> Study:
    """The study called "fedpals/table1", say. Raises InputError as `target` does."""
    one = target(name)
    if not isinstance(one, Study):
        raise InputError(f"{name} is drawn from data alone; no runs belong to it")
    return one


def targets() -> dict[str, Target]:
    """Everything that can be reproduced, paper by paper."""
    everything: dict[str, Target] = {**studies(), **figures()}
    papers = dict.fromkeys(name.partition("/")[0] for name in everything)
    order = sorted(everything, key=lambda name: list(papers).index(name.partition("/")[0]))
    return {name: everything[name] for name in order}


def target(name: str) -> Target:
    """The table or figure of this name. Raises InputError, with the nearest match, without one."""
    by_name = targets()
    alike = [other for other in by_name if other.endswith(f"/{name}")]
    if len(alike) > 1:
        raise InputError(f"{name} is in several papers: {', '.join(alike)}; name one of these")
    if name not in by_name:
        raise unknown("table or figure", name, by_name)
    return by_name[name]


def shipped_tuning(study: Study) -> Path:
    """The tuned hyper-parameters that come with the paper's protocol."""
    paper = study.name.partition("/")[0]
    return Path(str(files("fedshift_papers.protocols"))) / f"{paper}_tuned.json"


def folders_with(name: str) -> tuple[str, ...]:
    """The folders of the project's repository with results of this table or figure."""
    return tuple(row["folder"] for row in printed_rows("measured") if row["target"] == name)


def measured_columns(one: Target) -> tuple[str, ...]:
    """The headings of the columns that these folders have, in their order."""
    rows = (row for row in printed_rows("measured") if row["target"] == one.name)
    return tuple(heading for row in rows for heading in row["columns"].split("; ") if heading)


def data_sets(one: Target) -> tuple[str, ...]:
    """The data sets that are used if --dataset names none."""
    if isinstance(one, Figure):
        return one.datasets
    return tuple(dict.fromkeys(c.settings["data"]["name"] for c in one.columns if not c.extra))


def absent(one: Target, missing: Missing = missing_data) -> tuple[str, ...]:
    """Data sets of a table that are missing or too small; `missing` gives the reason, or None."""
    if isinstance(one, Figure):
        return tuple(name for name in data_sets(one) if missing(name) is not None)
    lacking = (c.data[0] for c in one.columns if not c.extra and missing(*c.data))
    return tuple(dict.fromkeys(lacking))


def state_of(one: Target, missing: Missing = missing_data) -> str:
    """In words: measured here, runs here, or runs if the user provides the data."""
    places, lacking = folders_with(one.name), absent(one, missing)
    runs = "is drawn" if isinstance(one, Figure) else "runs"
    rest = [name for name in data_sets(one) if name not in lacking]
    parts = [f"measured here: {', '.join(places)}"] if places else []
    if lacking:
        here = f"{runs} here on {', '.join(rest)}, and " if rest and not places else f"{runs} "
        parts.append(f"{here}where data are given: {', '.join(lacking)}")
    return "; ".join(parts) or f"{runs} here"
