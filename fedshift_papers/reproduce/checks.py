"""Checks before the first run of a table: of options, and of every run's configuration."""

from __future__ import annotations

from itertools import product

from fedshift import datasets, recipes
from fedshift.engine.backend_names import ALONE
from fedshift.errors import InputError, unknown
from fedshift.experiments.config.networks import network
from fedshift.experiments.config.places import Source
from fedshift.experiments.config.schema import Data, Network
from fedshift.experiments.engines import backend_of
from fedshift.experiments.task.client_tests import pool_rows
from fedshift.experiments.task.custom_source import task_of
from fedshift_papers.protocols.study import Study
from fedshift_papers.reproduce.plan import LAMBDA_0, Plan, config_of

# Data sets that take minutes to load. Their networks are checked when the first run begins.
SLOW = ("pacs", "iwildcam", "gaussians")
# What a network depends on: [data] and [model] as JSON, and whether it has a router.
Kind = tuple[str, str, bool]


def check_backend(name: str, *, there: bool = True) -> None:
    """Raise InputError for a backend that is none of `ALONE`; there: also if it cannot run here."""
    if name not in ALONE:
        raise unknown("backend of a table", name, ALONE)
    if there:
        backend_of(name)


def check_plan(plan: Plan, *, networks: bool = True) -> None:
    """Raise InputError if --rounds or -c make any run of the table impossible; names its methods.

    networks: if -c changes [model] or [data], also load the data and build every network once.
    """
    if plan.rounds is not None:
        _check_tuning(plan)
    # Without -c there are only the protocol's own configurations, which tests have checked.
    if not plan.overrides:
        return
    shaped = networks and any(o.strip().startswith(("model", "data")) for o in plan.overrides)
    rows_by_reason: dict[str, dict[str, None]] = {}
    built: dict[Kind, str] = {}
    # A cell whose data are missing is reported in the table: --rounds and -c are not to blame.
    columns = [column for column in plan.study.columns if column.missing() is None]
    rows = [row for row in plan.study.rows if row.available]
    for column, row in product(columns, rows):
        try:
            config = config_of(plan, row, column, LAMBDA_0 if row.ess else {}, 0)
            if shaped:
                with Source(overrides=plan.overrides).placing():
                    routed = recipes.traits_of(config.method.name).router
                    clients = config.shift.clients if routed else None
                    _build(config.data, config.model, clients, config.seeds.resolved().split, built)
        except InputError as e:
            # The cell's name is cut off, so that one mistake in many cells is one message.
            why = str(e).replace(f"{plan.study.name}, {column.key}, {row.label}: ", "")
            rows_by_reason.setdefault(why, {})[row.key] = None
    if rows_by_reason:
        raise InputError(
            "\n".join(f"{', '.join(keys)}: {why}" for why, keys in rows_by_reason.items())
        )


def check_grids(study: Study, whole: Study) -> None:
    """Raise InputError for --tune if no row has a grid; whole: the study with all its rows."""
    if any(row.grid for row in study.rows):
        return
    others = dict.fromkeys(row.key for row in whole.rows if row.grid)
    which = f"; of this target, only {', '.join(others)} have one" if others else ""
    raise InputError(
        f"--tune: {study.name} has no grid of hyper-parameters to choose from"
        f"{' in these rows' * bool(others)}{which}. Leave out --tune"
    )


def _check_tuning(plan: Plan) -> None:
    short: dict[str, None] = {}
    least = 0
    for column in plan.study.columns:
        rounds = plan.rounds_of(column)
        for row in (row for row in plan.study.rows if row.available):
            if any(plan.options_of(row, column)[name] >= rounds for name in row.scaled):
                short[row.key] = None
                # The fewest --rounds that leave this column two: one together, one for tuning.
                least = max(least, -(-2 * plan.study.rounds // column.rounds))
    if short:
        raise InputError(
            f"--rounds {plan.rounds} is too few for {', '.join(short)}, whose last round at least "
            f"is for tuning, after one together; give --rounds {least} or more, or leave these "
            "methods out with --methods"
        )


def _build(
    data: Data, model: Network, clients: int | None, seed: int, built: dict[Kind, str]
) -> None:
    """Check `data.limit`, and build the network for the data's shape, once for each kind of run.

    clients  how many clients the router tells apart, None without a router
    seed     of the split
    built    the kinds tried so far, each with the reason why it failed, or ""
    """
    kind = (data.model_dump_json(), model.model_dump_json(), clients is not None)
    if data.name not in SLOW and kind not in built:
        try:
            shape, classes = _shape(data, seed)
            network(model, shape, classes, 0, clients)
            built[kind] = ""
        except InputError as e:
            built[kind] = str(e)
    if built.get(kind):
        raise InputError(built[kind])


def _shape(section: Data, seed: int) -> tuple[tuple[int, ...], int]:
    """(shape of an input, number of classes) of a run's data; checks `data.limit` as well."""
    if section.source is not None:
        task = task_of(section, seed)
        return task.input_shape, len(task.classes)
    data = datasets.load(section.name, size=section.size)
    pool_rows(data, section.limit, 0)
    return tuple(data.train.x.shape[1:]), len(data.classes)
