"""Loading the router of a run folder, and its refits in router.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedshift import recipes
from fedshift.arguments import check_path
from fedshift.errors import DataError, InputError, check_name
from fedshift.experiments.config.schema import Config
from fedshift.experiments.config.training_objects import setting
from fedshift.experiments.folder.model_file import (
    FIRST,
    FIRST_BUFFERS,
    ON_SITES,
    WHO,
    check_fit,
    complete,
    read_parts,
    took_part,
    without_correction,
)
from fedshift.experiments.folder.run_models import (
    classes_in,
    complete_config,
    network_of,
    sizes_in,
)
from fedshift.record.folder import CLIENTS, MODEL, ROUTER
from fedshift.router.calibration import Calibration, HeldOut
from fedshift.router.moments import Moments, pooled
from fedshift.router.route import Router
from fedshift.router.score import ClientHead, Prior
from fedshift.tree import Params, Parts, unflatten

Fit = Literal["trained", "refitted", "moment"]


def load_router(
    folder: Path | str,
    prior: Prior = "posterior",
    *,
    shape: tuple[int, ...] | None = None,
    fit: Fit = "trained",
) -> Router:
    """The router of a complete run of FedDRM, as it was after the last round.

    fit: "trained" for the router as it was trained. "refitted" and "moment" have the last layer
    that the run fitted at its end, by gradients and from moments. In a federation of machines the
    clients' models stay at their sites: there `route` names the client to ask, and `predict` is
    refused.

    shape: of one input, as (1, 28, 28). If left out it is looked up in the run's data set, which
    must then be on this machine. Queries must be preprocessed as the run's inputs were
    (`Prepared.task` has them).

    Raises InputError for a folder that is no complete run, or of a method without a router, and
    DataError for files that are missing or damaged.
    """
    check_path("folder", folder)
    check_name("fit", fit, get_args(Fit))
    place = Path(folder)
    config = _configured(place)
    path, sizes = place / MODEL, sizes_in(place / CLIENTS)
    # The router was trained with the uncorrected model. A correction changes which labels the
    # server's model answers, not which client a query is sent to.
    parts = without_correction(read_parts(path))
    model = network_of(config, place, len(sizes), shape)
    classes = len(classes_in(place))
    # Routing does not depend on the target, so any will do to build the method: an even one.
    method = recipes.recipe(config.method.name, config.method.options).make(
        setting(
            config.training, model, (1.0 / classes,) * classes, clients=config.shift.clients,
            seed=config.seeds.resolved().init,
        ),
        **config.method.options,
    )  # fmt: skip
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
    """Client id -> the parts that it keeps to itself, for the clients that took part."""
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
    return {i: {"private": {}, "private_buffers": {}} | state for i, state in states.items()}


def fits_of(routers: Mapping[str, Router]) -> Parts:
    """The parts of router.safetensors: each fit's head, sizes, calibration figures and moments."""
    return {name: _part(router) for name, router in routers.items()}


def _part(router: Router) -> Params:
    assert router.head is not None  # a refit has one
    part = {"gamma": router.head.gamma, "xi": router.head.xi, "sizes": router.sizes}
    if (figures := router.calibration) is not None:
        part |= {"chosen": _numbers(figures.strength, figures.temperature)}
        part |= {"after": _numbers(*figures.after)}
        part |= {} if figures.before is None else {"before": _numbers(*figures.before)}
    if (gaussians := router.gaussians) is not None:
        columns = zip(*gaussians.sent, strict=True)
        part |= {k: torch.stack(v) for k, v in zip(Moments._fields, columns, strict=True)}
        part |= {"loading": _numbers(gaussians.loading)}
    return part


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def with_fit(router: Router, path: Path, fit: str) -> Router:
    """The router with its last layer replaced by the fit of this name in the file.

    Raises InputError for a fit that the file lacks, and DataError for a file that is missing or
    damaged.
    """
    try:
        parts = unflatten({name: v.clone() for name, v in load_file(path).items()})
    except FileNotFoundError:
        raise DataError(f"{path}: missing: this run has no refit of its router") from None
    except (OSError, SafetensorError, ValueError, LookupError, RuntimeError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from None
    if fit not in parts:
        raise InputError(f'{path}: no fit "{fit}"; there is {" and ".join(sorted(parts))}')
    try:
        return _with(router, parts[fit])
    except (LookupError, RuntimeError, ValueError, TypeError) as e:
        raise DataError(f"{path}: damaged ({type(e).__name__}: {e})") from None


def _with(router: Router, part: Params) -> Router:
    clients, sizes = len(router.sizes), part["sizes"]
    if part["gamma"].shape != (clients,) or sizes.shape != (clients,):
        raise ValueError(f"a head of {len(part['gamma'])} clients, and the run has {clients}")
    figures, gaussians = None, None
    if "after" in part:
        before = _figures(part["before"]) if "before" in part else None
        figures = Calibration(before, _figures(part["after"]), *part["chosen"].tolist())
    if "loading" in part:
        rows = zip(*(part[name] for name in Moments._fields), strict=True)
        gaussians = pooled([Moments(*row) for row in rows], float(part["loading"]))
    head = ClientHead(part["gamma"], part["xi"])
    return replace(router, head=head, sizes=sizes, calibration=figures, gaussians=gaussians)


def _figures(numbers: Tensor) -> HeldOut:
    examples, *others = numbers.tolist()
    return HeldOut(int(examples), *others)
