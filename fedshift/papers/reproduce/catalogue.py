"""The tables and figures that can be reproduced, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fedshift.errors import InputError, unknown
from fedshift.papers.pictures.figures import figures
from fedshift.papers.pictures.picture import Figure
from fedshift.papers.protocols import (
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
from fedshift.papers.protocols.study import Study

# Of runs, and of data alone.
Target = Study | Figure


def studies() -> dict[str, Study]:
    """Every study of every paper, by name."""
    sets = (labelsets, labelset_tuning, labelset_natural)
    papers = (fedpals, feddrm, feddrm_two_cores, routing, *sets, made, participation)
    return {name: study for paper in papers for name, study in paper.studies().items()}


def study(name: str) -> Study:
    """The study of a name like "fedpals/table1". Raises InputError as `target`."""
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
    """The table or figure of a name. Raises InputError with the nearest match."""
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
    return Path(str(files("fedshift.papers.protocols"))) / f"{paper}_tuned.json"
