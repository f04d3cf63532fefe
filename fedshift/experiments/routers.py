"""The router of a run folder."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from fedshift import recipes
from fedshift.errors import DataError, InputError, shown
from fedshift.experiments.config import Config
from fedshift.experiments.folder import CONFIG, SUMMARY, summary_of
from fedshift.experiments.load import load_config
from fedshift.experiments.networks import network
from fedshift.experiments.settings import setting
from fedshift.experiments.stored import misfit, read_parts
from fedshift.experiments.task import prepare
from fedshift.files import is_file
from fedshift.model import Model
from fedshift.router.route import Router
from fedshift.router.score import Prior
from fedshift.tree import Params, Parts

MODEL, CLIENTS = "model.safetensors", "clients.csv"


def load_router(
    folder: Path | str, prior: Prior = "posterior", *, shape: tuple[int, ...] | None = None
) -> Router:
    """The router of a complete run of FedDRM, as it was after the last round.

    shape: of one input, as (1, 28, 28); left out, it is looked up in the run's data set, which must
    be there then. Clients that keep nothing of their own (feddrm_shared_head) all count as taking
    part. Inputs of queries go through what the run's went through (`Prepared.task` has them).

    Raises InputError for a folder that is none, not complete, or of another method, and DataError
    for files that are missing or damaged.
    """
    place = Path(folder)
    config = _configured(place)
    parts, sizes = read_parts(place / MODEL), _sizes(place / CLIENTS)
    model = _network(config, place, len(sizes), shape)
    classes = _classes(place)
    method = recipes.recipe(config.method.name).make(
        setting(config, model, (1.0 / classes,) * classes), **config.method.options
    )
    _check_fit(place / MODEL, model, [parts.values()])
    server = {"params": parts["params"], "buffers": parts["buffers"], "table": {"n": sizes}}
    states = _states(place / MODEL, config, parts, sizes)
    router = Router.of(method, server, states, prior)
    _check_fit(place / MODEL, model, router.served.values())
    return router


def _configured(folder: Path) -> Config:
    if not is_file(folder / CONFIG):
        raise InputError(
            f"{folder}: not a run folder (no {CONFIG}); give one that `fedshift run` has left"
        )
    config = load_config(folder / CONFIG)
    if config.method.name not in recipes.routed.__all__:
        raise InputError(
            f'{folder}: a run of "{config.method.name}", which trains no router; give one of '
            f"{' or '.join(recipes.routed.__all__)}"
        )
    if not is_file(folder / SUMMARY):
        raise InputError(
            f"{folder}: this run is not complete; `fedshift run --resume {folder}` goes on with it"
        )
    return config


def _classes(folder: Path) -> int:
    names = summary_of(folder).get("classes")
    if not isinstance(names, list) or not names:
        raise DataError(f"{folder / SUMMARY}: damaged (it does not name the classes)")
    return len(names)


def _sizes(path: Path) -> Tensor:
    try:
        with path.open(encoding="utf-8", newline="") as f:
            n = [float(row["n"]) for row in csv.DictReader(f)]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as e:
        raise DataError(
            f"{path}: cannot be read: {shown(str(e), 200)}; it has the clients' sizes"
        ) from None
    if not n or not all(math.isfinite(v) and v >= 0 for v in n):
        raise DataError(f"{path}: cannot be read: sizes of {n[:3]}; it has the clients' sizes")
    return torch.tensor(n, dtype=torch.float64)


def _network(config: Config, folder: Path, clients: int, shape: tuple[int, ...] | None) -> Model:
    if shape is None:
        return prepare(config).model
    classes = _classes(folder)
    return network(config.model, shape, classes, config.seeds.resolved().init, clients)


def _check_fit(path: Path, model: Model, many: Iterable[Iterable[Params]]) -> None:
    """Each of these must be this network's trees, in names and shapes."""
    for trees in many:
        if odd := misfit(trees, model):
            raise DataError(f"{path}: {odd}; give the shape of one input as in training")


def _states(path: Path, config: Config, parts: Parts, sizes: Tensor) -> dict[int, Parts]:
    """Client id -> its own parts, for those that took part."""
    states: dict[int, Parts] = {}
    known = {f"client{i}": i for i in range(len(sizes))}
    for part, tree in parts.items():
        owner, _, name = part.partition(".")
        if part not in ("params", "buffers"):
            if owner not in known:
                raise DataError(f'{path}: "{part}" is no part of one of {len(sizes)} clients')
            states.setdefault(known[owner], {})[name] = tree
    if config.method.name == "feddrm_shared_head":
        states = {i: {} for i in range(len(sizes))}
    return {i: {"private": {}, "private_buffers": {}} | own for i, own in states.items()}
