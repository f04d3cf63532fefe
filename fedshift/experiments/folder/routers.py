"""The router of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from fedshift import recipes
from fedshift.arguments import check_path
from fedshift.errors import DataError, InputError, check_name
from fedshift.experiments.config.schema import Config
from fedshift.experiments.config.settings import setting
from fedshift.experiments.folder.corrected_parts import without_correction
from fedshift.experiments.folder.router_file import with_fit
from fedshift.experiments.folder.run_models import (
    FIRST,
    FIRST_BUFFERS,
    ON_SITES,
    WHO,
    check_fit,
    classes_in,
    complete,
    complete_config,
    network_of,
    sizes_in,
    took_part,
)
from fedshift.experiments.folder.stored import read_parts
from fedshift.record.folder import CLIENTS, MODEL, ROUTER
from fedshift.router.route import Router
from fedshift.router.score import Prior
from fedshift.tree import Parts

Fit = Literal["trained", "refitted", "moment"]


def load_router(
    folder: Path | str,
    prior: Prior = "posterior",
    *,
    shape: tuple[int, ...] | None = None,
    fit: Fit = "trained",
) -> Router:
    """The router of a complete run of FedDRM, as it was after the last round.

    fit: "trained", or with the last layer "refitted" or from "moment"s, as the run fitted them at
    its end. The router of a federation of machines has no clients' models, which are at their
    sites: `route` names the client to ask, and `predict` is refused.

    shape: of one input, as (1, 28, 28); left out, it is looked up in the run's data set, which must
    be there then. Inputs of queries go through what the run's went through (`Prepared.task` has
    them).

    Raises InputError for a folder that is none, not complete, or of another method, and DataError
    for files that are missing or damaged.
    """
    check_path("folder", folder)
    check_name("fit", fit, get_args(Fit))
    place = Path(folder)
    config = _configured(place)
    path, sizes = place / MODEL, sizes_in(place / CLIENTS)
    # A router names the client; the correction is of the labels that the server's model gives.
    parts = without_correction(read_parts(path))
    model = network_of(config, place, len(sizes), shape)
    classes = len(classes_in(place))
    # The target plays no part in routing, so an even one stands for it.
    method = recipes.recipe(config.method.name, config.method.options).make(
        setting(config, model, (1.0 / classes,) * classes), **config.method.options
    )
    check_fit(path, model, [[tree for part, tree in parts.items() if part != WHO]])
    server = {"params": parts["params"], "buffers": parts["buffers"], "table": {"n": sizes}}
    if ON_SITES in parts.get(WHO, {}):
        check_fit(path, model, [complete(parts)])
        members = took_part(parts, len(sizes), path)
        router = Router.of_sites(method, server, complete(parts), members, prior)
    else:
        router = Router.of(method, server, _states(path, parts, len(sizes)), prior)
        check_fit(path, model, router.served.values())
    return router if fit == "trained" else with_fit(router, place / ROUTER, fit)


def _configured(folder: Path) -> Config:
    config = complete_config(folder)
    if not recipes.traits_of(config.method.name).router:
        routed = " or ".join(one.name for one in recipes.recipes() if one.traits.router)
        raise InputError(
            f'{folder}: a run of "{config.method.name}", which trains no router; give one of '
            f"{routed}"
        )
    return config


def _states(path: Path, parts: Parts, clients: int) -> dict[int, Parts]:
    """Client id -> its own parts, for those that took part."""
    states: dict[int, Parts] = {}
    owners = {f"client{i}": i for i in range(clients)}
    for part, tree in parts.items():
        owner, _, name = part.partition(".")
        if part not in ("params", "buffers", FIRST, FIRST_BUFFERS, WHO):
            if owner not in owners:
                raise DataError(f'{path}: "{part}" is no part of one of {clients} clients')
            states.setdefault(owners[owner], {})[name] = tree
    if WHO in parts:
        states = {i: states.get(i, {}) for i in took_part(parts, clients, path)}
    elif not states:  # an older version: it did not record participants, and clients keep nothing
        states = {i: {} for i in range(clients)}
    return {i: {"private": {}, "private_buffers": {}} | state for i, state in states.items()}
